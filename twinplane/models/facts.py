"""What a model's files say about it, for people who look at it before they serve it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinplane.models.errors import ModelInvalid
from twinplane.models.folder import is_there, read_config, read_json
from twinplane.models.store import InstalledModel, describe

_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates", "chat_template.json")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model on this machine and what its files say; None for what they do not."""

    model: InstalledModel
    values: Mapping[str, object]


def read_facts(name: str, folder: Path) -> ModelFacts:
    """Reads the JSON files in the folder. Raises ModelInvalid for a config.json that can't be read;
    another file like that says nothing.
    """
    config = read_config(folder)
    tokenizer_config = _object(folder / "tokenizer_config.json")
    generation = _object(folder / "generation_config.json")
    text_config = config.get("text_config")
    inner: Mapping[str, Any] = text_config if isinstance(text_config, dict) else {}

    def said(*keys: str) -> object:
        found = (place[key] for place in (config, inner) for key in keys if key in place)
        return next(found, None)

    return ModelFacts(
        describe(name, folder),
        {
            "model_type": said("model_type"),
            "length": said("max_position_embeddings"),
            "vocabulary_size": said("vocab_size"),
            "layers": said("num_hidden_layers"),
            "hidden_size": said("hidden_size"),
            "data_type": said("dtype", "torch_dtype"),
            "chat_template": tokenizer_config.get("chat_template") is not None
            or any(is_there(folder / file) for file in _TEMPLATE_FILES),
            "sampling": {key: generation[key] for key in _SAMPLING if key in generation},
        },
    )


def _object(path: Path) -> Mapping[str, Any]:
    """The content of a file that need not be there."""
    try:
        return read_json(path) if is_there(path) else {}
    except ModelInvalid:
        return {}

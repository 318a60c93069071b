"""Turns one GGUF file into a Hugging Face model folder: weights, configuration, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinplane.models.errors import ModelInvalid
from twinplane.models.folder import CONFIG_NAME
from twinplane.models.gguf.file import GgufFile
from twinplane.models.gguf.llama_config import read_shape
from twinplane.models.gguf.llama_weights import tensor_streams
from twinplane.models.gguf.safetensors_writer import TensorStream, write_safetensors
from twinplane.models.gguf.tokenizer_conversion import build_tokenizer, tokenizer_config
from twinplane.models.gguf.tokenizer_metadata import read_tokenizer_metadata
from twinplane.models.progress import Progress

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Goes up when the same GGUF file gives another folder, or is refused: cached folders are then made
# again.
CONVERSION_VERSION = 3


@dataclass(frozen=True, slots=True, eq=False)
class GgufModel:
    """What a GGUF file becomes: JSON files by their names, a tokenizer, and tensors to convert."""

    json_files: Mapping[str, Mapping[str, object]]
    tokenizer: Tokenizer
    streams: Sequence[TensorStream]

    @property
    def config(self) -> Mapping[str, object]:
        """The content of config.json."""
        return self.json_files[CONFIG_NAME]


def convert_gguf(source: Path, folder: Path, progress: Progress, *, weights: bool = True) -> None:
    """Writes config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    model.safetensors (float32) into `folder`, which exists and is empty; without `weights` all but
    the last.

    Everything is checked before the first weight is written. At most about 20 MiB of weights are
    in memory at once. Raises ModelInvalid or ConversionUnsupported.
    """
    progress.stage("Reading")
    model = read_gguf(source)
    for name, content in model.json_files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    # Not by its own `save`, whose errors are no OSError when the disk is full.
    (folder / "tokenizer.json").write_text(model.tokenizer.to_str(pretty=True), encoding="utf-8")

    if not weights:
        return
    progress.stage("Converting", sum(stream.byte_count for stream in model.streams))
    write_safetensors(folder / "model.safetensors", model.streams, progress)


def read_gguf(source: Path) -> GgufModel:
    """Everything that a conversion checks. No weight is read. Raises as `convert_gguf` does."""
    file = GgufFile(source)
    shape = read_shape(file)
    streams = tensor_streams(file, shape)
    metadata = read_tokenizer_metadata(file)
    if len(metadata.tokens) > shape.vocabulary_size:
        raise ModelInvalid(
            f"{source}: {len(metadata.tokens)} tokens and {shape.vocabulary_size} embeddings"
        )
    tokenizer = build_tokenizer(metadata)
    config = shape.config(metadata.bos, metadata.eos, metadata.padding)
    token_ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    json_files = {
        CONFIG_NAME: config,
        "generation_config.json": token_ids,
        "tokenizer_config.json": tokenizer_config(metadata, shape.context_length),
    }
    return GgufModel(json_files, tokenizer, streams)

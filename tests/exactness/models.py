"""The models the matrix is run on: the default one, and a cut of it that is fast enough for all."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from twinplane.models import resolve

DEFAULT = "smollm2-135m-instruct"
CUT_LAYERS = 2
CUT_VOCABULARY = 4096


def default_model() -> Path:
    """The folder in the model cache."""
    return resolve(DEFAULT)


def cut_model(into: Path) -> Path:
    """Writes the default model's first layers and tokens: its shapes, at a tenth of its time."""
    source = default_model()
    config = json.loads((source / "config.json").read_text())
    config |= {"num_hidden_layers": CUT_LAYERS, "vocab_size": CUT_VOCABULARY}
    kept = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        parts = name.split(".")
        if "embed_tokens" in parts or "lm_head" in parts:
            kept[name] = tensor[:CUT_VOCABULARY].clone()
        elif "layers" not in parts or int(parts[parts.index("layers") + 1]) < CUT_LAYERS:
            kept[name] = tensor
    (into / "config.json").write_text(json.dumps(config))
    save_file(kept, into / "model.safetensors")
    return into

"""Qwen2 (Yang et al. 2024, arXiv:2407.10671): a Llama with biases of query, key and value, and
windows in some layers where config.json turns them on."""

from __future__ import annotations

from collections.abc import Callable

from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import describe_llama_like, sliding_window
from worker_service.model.spec import DecoderSpec

_DEFAULT_FIRST_WINDOWED_LAYER = 28


def _describe(reader: ConfigReader) -> DecoderSpec:
    return describe_llama_like(
        reader, QWEN2.architecture, qkv_bias=True, output_bias=False, window_of=windows(reader)
    )


def windows(reader: ConfigReader) -> Callable[[int], int | None]:
    """The window of a layer by its index, as Qwen's config.json says it."""
    window = sliding_window(reader) if reader.flag("use_sliding_window", False) else None
    if window is None:
        return lambda layer: None
    kinds = reader.values.get("layer_types")
    if kinds is None:
        first = reader.integer("max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER, minimum=0)
        return lambda layer: window if layer >= first else None
    layer_count = reader.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != layer_count:
        raise CheckpointInvalid(f"config.json: layer_types must name {layer_count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelUnsupported("layer_types", kind, "full_attention, sliding_attention")
    return lambda layer: window if kinds[layer] == "sliding_attention" else None


QWEN2 = Family("Qwen2ForCausalLM", _describe)

"""Qwen2 (Yang et al. 2024, arXiv:2407.10671): a Llama with biases of query, key and value, and
windows in some layers where config.json turns them on."""

from __future__ import annotations

from collections.abc import Callable

from worker_service.load_errors import CheckpointInvalid
from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import (
    WINDOWED,
    Variant,
    describe_llama_like,
    layer_kinds,
    refuse_flag,
    sliding_window,
)
from worker_service.model.spec import DecoderSpec

_DEFAULT_FIRST_WINDOWED_LAYER = 28


def _describe(reader: ConfigReader) -> DecoderSpec:
    refuse_flag(reader, "mlp_bias")
    return describe_llama_like(
        reader,
        QWEN2.architecture,
        Variant(max_length=32768, kv_head_count=32, qkv_bias=True, window_of=windows(reader)),
    )


def windows(reader: ConfigReader) -> Callable[[int], int | None]:
    """The window of a layer by its index, as Qwen's config.json says it."""
    window, used = sliding_window(reader), reader.flag("use_sliding_window", False)
    first = reader.integer("max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER, minimum=0)
    kinds = layer_kinds(reader)
    if window is None or not used:
        if kinds is not None and WINDOWED in kinds:
            raise CheckpointInvalid(
                f"config.json: layer_types names {WINDOWED}, but use_sliding_window and "
                "sliding_window turn no window on"
            )
        return lambda layer: None
    if kinds is None:
        return lambda layer: window if layer >= first else None
    return lambda layer: window if kinds[layer] == WINDOWED else None


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", _describe)

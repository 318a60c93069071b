"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama whose layers attend to a window."""

from __future__ import annotations

from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import (
    FULL,
    WINDOWED,
    Variant,
    describe_llama_like,
    layer_kinds,
    refuse_flag,
    refuse_kinds,
    sliding_window,
)
from worker_service.model.spec import DecoderSpec


def _describe(reader: ConfigReader) -> DecoderSpec:
    for key in ("attention_bias", "mlp_bias"):
        refuse_flag(reader, key)
    window = sliding_window(reader)
    refuse_kinds(layer_kinds(reader), FULL if window is None else WINDOWED)
    return describe_llama_like(
        reader,
        MISTRAL.architecture,
        Variant(max_length=4096 * 32, kv_head_count=8, window_of=lambda _: window),
    )


MISTRAL = Family("MistralForCausalLM", "mistral", _describe)

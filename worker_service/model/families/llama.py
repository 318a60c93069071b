"""Llama (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import (
    FULL,
    Variant,
    describe_llama_like,
    layer_kinds,
    refuse_kinds,
)
from worker_service.model.spec import DecoderSpec


def _describe(reader: ConfigReader) -> DecoderSpec:
    biased = reader.flag("attention_bias", False)
    refuse_kinds(layer_kinds(reader), FULL)
    return describe_llama_like(
        reader,
        LLAMA.architecture,
        Variant(
            max_length=2048,
            kv_head_count=None,
            qkv_bias=biased,
            output_bias=biased,
            mlp_bias=reader.flag("mlp_bias", False),
        ),
    )


LLAMA = Family("LlamaForCausalLM", "llama", _describe)

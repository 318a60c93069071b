"""Llama (Touvron et al. 2023, arXiv:2302.13971)."""

from __future__ import annotations

from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import describe_llama_like
from worker_service.model.spec import DecoderSpec


def _describe(reader: ConfigReader) -> DecoderSpec:
    biased = reader.flag("attention_bias", False)
    return describe_llama_like(
        reader, LLAMA.architecture, qkv_bias=biased, output_bias=biased, window_of=lambda _: None
    )


LLAMA = Family("LlamaForCausalLM", _describe)

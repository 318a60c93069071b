"""Mistral (Jiang et al. 2023, arXiv:2310.06825): a Llama whose layers attend to a window."""

from __future__ import annotations

from worker_service.model.config import ConfigReader
from worker_service.model.families.family import Family
from worker_service.model.families.llama_like import describe_llama_like, sliding_window
from worker_service.model.spec import DecoderSpec


def _describe(reader: ConfigReader) -> DecoderSpec:
    biased = reader.flag("attention_bias", False)
    window = sliding_window(reader)
    return describe_llama_like(
        reader,
        MISTRAL.architecture,
        qkv_bias=biased,
        output_bias=biased,
        window_of=lambda _: window,
    )


MISTRAL = Family("MistralForCausalLM", _describe)

"""Model folders with random weights, written by transformers: the reference and what we load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 131
MAX_LENGTH = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_RNG = np.random.default_rng(17)
PROMPTS = [_RNG.integers(0, VOCABULARY, length).tolist() for length in (30, 1, 7, 64, 16, 3)]
"""Token ids shorter than, as long as and longer than a block and a chunk."""


def llama(**changes: Any) -> PreTrainedModel:
    """A Llama with random weights and biases, float32."""
    return _initialised(LlamaForCausalLM, LlamaConfig(**{**SHAPE, **changes}))


def mistral(**changes: Any) -> PreTrainedModel:
    return _initialised(MistralForCausalLM, MistralConfig(**{**SHAPE, **changes}))


def qwen2(**changes: Any) -> PreTrainedModel:
    return _initialised(Qwen2ForCausalLM, Qwen2Config(**{**SHAPE, **changes}))


def qwen3(**changes: Any) -> PreTrainedModel:
    """A Llama with norms of query and key heads."""
    return _initialised(Qwen3ForCausalLM, Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))


def save(model: PreTrainedModel, folder: Path, **config_changes: Any) -> Path:
    """Writes the folder; `config_changes` are made to its config.json, None removes a key."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in config_changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    path.write_text(json.dumps(config))
    return folder


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """float32 [tokens, vocabulary] of one whole pass."""
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float()


def _initialised(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(5)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts norms at one and biases at zero: a test would not see them.
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model

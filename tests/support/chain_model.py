"""A model folder whose greedy output a test writes down itself: real weights, real arithmetic.

A Llama of one layer that does nothing, over an embedding of unit vectors. Row r of the head is the
sum of 8 times the unit vectors of all tokens that r follows: what comes next is a function of the
last token alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

MAX_LENGTH = 256
_HEAD = 64


def chained(*tokens: int) -> dict[int, int]:
    """The successors by which these tokens follow one another."""
    return dict(pairwise(tokens))


def write_chain_model(
    folder: Path,
    tokenizer: Tokenizer,
    successors: Mapping[int, int],
    *,
    vocabulary_size: int | None = None,
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the folder. A token without a successor goes on with itself.

    `vocabulary_size` is the model's; by default all tokens of the tokenizer. `files` are further
    JSON files, or more keys for config.json.
    """
    size = vocabulary_size or 1 + max(tokenizer.get_vocab().values())
    hidden = -(-size // _HEAD) * _HEAD
    head = torch.zeros(size, hidden)
    for token in range(size):
        head[successors.get(token, token), token] = 8.0
    layer = "model.layers.0"
    narrow = torch.zeros(_HEAD, hidden)
    tensors = {
        "model.embed_tokens.weight": torch.eye(size, hidden),
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        **{f"{layer}.self_attn.{name}_proj.weight": narrow.clone() for name in "qkv"},
        f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, _HEAD),
        f"{layer}.mlp.gate_proj.weight": narrow.clone(),
        f"{layer}.mlp.up_proj.weight": narrow.clone(),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, _HEAD),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": _HEAD,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_LENGTH,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    given = dict(files or {})
    given["config.json"] = {**config, **given.get("config.json", {})}
    for name, content in given.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def ids(tokenizer: Tokenizer, names: Sequence[str]) -> list[int]:
    """The ids of tokens written as in the vocabulary."""
    found = [tokenizer.token_to_id(name) for name in names]
    assert None not in found
    return found

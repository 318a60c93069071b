"""Whatever a config.json says: what transformers makes of it, or a refusal that names a key."""

from __future__ import annotations

import copy
import logging
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.config_cases import (
    FLAGS,
    INTEGERS,
    MODEL_TYPES,
    NUMBERS,
    WRONG,
    Config,
    plain,
    random_case,
)
from worker_service.domain.capability import DataType
from worker_service.layers.rope import build_table
from worker_service.load_errors import CheckpointInvalid, LoadError, ModelUnsupported
from worker_service.model.registry import describe
from worker_service.model.spec import DecoderSpec

CLASSES: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
}
# Whole numbers where transformers asks for a fraction, and nulls that some families derive.
MEANT = [("rms_norm_eps", 10**12), ("num_key_value_heads", None), ("head_dim", None)]
SEEDS = range(120)
POSITIONS = 40
DATA_TYPES = {
    None: None,
    torch.float32: DataType.FLOAT32,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float16: DataType.FLOAT16,
    torch.float64: DataType.FLOAT32,  # the widest that we compute in
}


@dataclass(frozen=True)
class Facts:
    """Everything of a decoder that its config decides, as plain values."""

    sizes: tuple[int, ...]
    heads: tuple[int, int, int]
    epsilon: float
    tied: bool
    biases: tuple[bool, bool, bool]
    windows: tuple[int | None, ...]
    rounded_angles: tuple[float, ...]
    data_type: DataType | None


def ours(spec: DecoderSpec) -> Facts:
    layer = spec.layers[0]
    heads, feed_forward = layer.attention.heads, layer.feed_forward
    assert layer.attention.rope is not None
    table = build_table(layer.attention.rope, POSITIONS, torch.float32, torch.device("cpu"))
    return Facts(
        (
            spec.vocabulary_size,
            spec.hidden_size,
            feed_forward.intermediate_size,
            len(spec.layers),
        ),
        (heads.head_count, heads.kv_head_count, heads.head_dim),
        spec.final_norm.epsilon,
        spec.head is None,
        (
            bool(layer.attention.qkv.biases),
            bool(layer.attention.output.biases),
            bool(feed_forward.down.biases),
        ),
        tuple(each.attention.heads.window for each in spec.layers),
        rounded(torch.cat([table.cos, table.sin])),
        spec.data_type,
    )


def theirs(config: Any) -> Facts:
    """The facts by which transformers' modeling code builds and runs the model."""
    count = config.num_attention_heads
    default_dim = config.hidden_size // count
    kind = config.model_type
    qwen2 = kind == "qwen2"
    if kind == "mistral":
        windows = [config.sliding_window] * config.num_hidden_layers
    elif qwen2:
        windows = [
            config.sliding_window if each == "sliding_attention" else None
            for each in config.layer_types
        ]
    else:
        windows = [None] * config.num_hidden_layers
    assert qwen2 is False or config.sliding_window or "sliding_attention" not in config.layer_types
    assert count // config.num_key_value_heads * config.num_key_value_heads == count
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(POSITIONS)[None])
    half = cos.shape[-1] // 2
    head_dim = getattr(config, "head_dim", default_dim)
    assert half * 2 == head_dim
    biased = kind == "llama" and config.attention_bias
    return Facts(
        (
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
        ),
        (count, config.num_key_value_heads, head_dim),
        config.rms_norm_eps,
        config.tie_word_embeddings,
        (qwen2 or biased, biased, kind == "llama" and config.mlp_bias),
        tuple(windows),
        rounded(torch.cat([cos[0, :, :half], sin[0, :, :half]])),
        DATA_TYPES[config.dtype],
    )


def rounded(angles: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(number, 4) for number in angles.flatten().tolist())


def transformers_facts(config: Config) -> Facts | Exception:
    """The facts, or the error with which transformers refuses the config."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    values = copy.deepcopy(config)
    kind = values.pop("model_type", None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            name = kind or next(
                each
                for each, known in CLASSES.items()
                if each in values["architectures"][0].lower()
            )
            return theirs(AutoConfig.for_model(name, **values))
    except Exception as error:  # its kind depends on the layer that notices
        return error


def our_facts(config: Config) -> Facts | LoadError:
    try:
        return ours(describe(copy.deepcopy(config)))
    except (CheckpointInvalid, ModelUnsupported) as refusal:
        return refusal


def compare(config: Config, touched: set[str]) -> bool:
    """Whether we serve the config, after asserting that this is right, or the refusal names a key
    that was touched."""
    found = our_facts(config)
    if isinstance(found, LoadError):
        assert any(key in str(found) for key in touched), (config, str(found))
        return False
    expected = transformers_facts(config)
    assert not isinstance(expected, Exception), (config, expected)
    assert found == expected, config
    return True


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_random_config_means_what_transformers_makes_of_it(model_type: str) -> None:
    served = 0
    for seed in SEEDS:
        case = random_case(model_type, seed)
        served += compare(case.config, case.touched)
    assert served > len(SEEDS) / 4


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_wrong_type_is_never_a_value(model_type: str) -> None:
    """Every key with every wrong value; some are right for some keys, and mean the same then."""
    config = plain(model_type, random.Random(3))
    config.setdefault("head_dim", 12)
    refused = 0
    for key in (*INTEGERS, *NUMBERS, *FLAGS):
        for value in WRONG:
            if (key, value) not in MEANT:
                refused += not compare({**config, key: value}, {key})
    assert refused > 0.7 * len(WRONG) * len(INTEGERS + NUMBERS + FLAGS)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_missing_key_has_transformers_default_or_is_named(model_type: str) -> None:
    for seed in range(8):
        config = plain(model_type, random.Random(seed))
        for key in config:
            compare({name: config[name] for name in config if name != key}, {key})


@pytest.mark.parametrize(
    ("model_type", "length"), [("llama", 2048), ("mistral", 131072), ("qwen2", 32768)]
)
def test_the_length_follows_the_default_and_the_scaling(model_type: str, length: int) -> None:
    config = plain(model_type, random.Random(1))
    del config["max_position_embeddings"]
    assert describe(config).max_length == length == CLASSES[model_type]().max_position_embeddings
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": length}
    assert describe({**config, "rope_scaling": yarn}).max_length == 4 * length

"""config.json: what is understood, and that the rest is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from worker_service.domain.capability import DataType
from worker_service.layers.rope import LinearScaling, Unscaled, YarnScaling
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import Architecture, ModelConfig, parse_config

SMALLEST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


def parsed(**changes: Any) -> ModelConfig:
    return parse_config({**SMALLEST, **changes})


def test_defaults_are_those_of_transformers() -> None:
    config = parsed()
    assert config.architecture is Architecture.LLAMA
    assert (config.kv_head_count, config.head_dim, config.norm_epsilon) == (8, 8, 1e-6)
    assert config.rope.theta == 10000.0
    assert config.rope.scaling == Unscaled()
    assert config.layer_windows == (None,) * 4
    assert config.data_type is None
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.tied_embeddings)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_names_of_the_data_type_are_read(key: str) -> None:
    assert parsed(**{key: "bfloat16"}).data_type is DataType.BFLOAT16


def test_biases_follow_the_architecture() -> None:
    qwen2 = parsed(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    biased = parsed(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


def test_windows_follow_the_architecture() -> None:
    assert parsed(sliding_window=7).layer_windows == (None,) * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert parsed(**mistral, sliding_window=7).layer_windows == (7,) * 4
    assert parsed(**mistral, sliding_window=None).layer_windows == (None,) * 4
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}
    assert parsed(**qwen2).layer_windows == (None,) * 4
    older = parsed(**qwen2, use_sliding_window=True, max_window_layers=3)
    assert older.layer_windows == (None, None, None, 7)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    newer = parsed(**qwen2, use_sliding_window=True, layer_types=kinds)
    assert newer.layer_windows == (7, None, 7, None)


def test_rope_is_read_in_both_generations() -> None:
    new = parsed(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0})
    old = parsed(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=7.0)
    assert new.rope == old.rope
    assert new.rope.scaling == LinearScaling(2.0)


def test_the_original_length_outside_the_scaling_wins_as_in_transformers() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 99}
    inside = parsed(rope_scaling=scaling).rope.scaling
    outside = parsed(rope_scaling=scaling, original_max_position_embeddings=77).rope.scaling
    assert isinstance(inside, YarnScaling)
    assert isinstance(outside, YarnScaling)
    assert (inside.original_length, outside.original_length) == (99, 77)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"hidden_size": 56}, "head_dim"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["chunked_attention"] * 4,
            },
            "layer_types",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], setting: str) -> None:
    with pytest.raises(ModelUnsupported) as raised:
        parsed(**changes)
    assert raised.value.setting == setting
    assert setting in str(raised.value)


def test_the_refused_value_is_named() -> None:
    with pytest.raises(ModelUnsupported, match="quantization_config 'awq' is not supported"):
        parsed(quantization_config={"quant_method": "awq"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"architectures": []}, "architectures"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks rope_scaling.factor"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointInvalid, match=words):
        parsed(**changes)

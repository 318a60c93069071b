"""config.json: what is understood, and that the rest is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from worker_service.domain.capability import DataType
from worker_service.layers.rope_scaling import LinearScaling, Rope, Unscaled, YarnScaling
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.registry import describe
from worker_service.model.spec import DecoderSpec
from worker_service.model.traits import traits_of

SMALLEST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}


MISTRAL: dict[str, Any] = {"architectures": ["MistralForCausalLM"]}
QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 8}


def parsed(**changes: Any) -> DecoderSpec:
    return describe({**SMALLEST, **changes})


def windows(**changes: Any) -> tuple[int | None, ...]:
    return tuple(layer.attention.heads.window for layer in parsed(**changes).layers)


def biases(spec: DecoderSpec) -> tuple[bool, bool, bool]:
    """Whether query, key and value, the attention's output, and the feed-forward have biases."""
    (layer,) = {
        (
            len(layer.attention.qkv.biases) == 3,
            bool(layer.attention.output.biases),
            len(layer.feed_forward.up.biases) == 2 and bool(layer.feed_forward.down.biases),
        )
        for layer in spec.layers
    }
    return layer


def rope(spec: DecoderSpec) -> Rope:
    (found,) = {layer.attention.rope for layer in spec.layers}
    assert found is not None
    return found


def test_defaults_are_those_of_transformers() -> None:
    spec = parsed()
    assert spec.architecture == "LlamaForCausalLM"
    heads = spec.layers[0].attention.heads
    assert (heads.kv_head_count, heads.head_dim, heads.scale) == (8, 8, 1 / math.sqrt(8))
    assert spec.final_norm.epsilon == 1e-6
    assert rope(spec) == Rope(10000.0, 8, Unscaled())
    assert windows() == (None,) * 4
    assert spec.data_type is None
    assert biases(spec) == (False, False, False)
    assert spec.head is not None
    assert not traits_of(spec)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_names_of_the_data_type_are_read(key: str) -> None:
    assert parsed(**{key: "bfloat16"}).data_type is DataType.BFLOAT16


def test_biases_follow_the_architecture() -> None:
    assert biases(parsed(**QWEN2)) == (True, False, False)
    assert biases(parsed(attention_bias=True, mlp_bias=True)) == (True, True, True)


def test_windows_follow_the_architecture() -> None:
    assert windows(sliding_window=7) == (None,) * 4
    assert windows(**MISTRAL, sliding_window=7) == (7,) * 4
    assert windows(**MISTRAL, sliding_window=None) == (None,) * 4
    assert windows(**MISTRAL) == (4096,) * 4  # transformers' default
    assert windows(**QWEN2, sliding_window=7) == (None,) * 4
    used = {**QWEN2, "use_sliding_window": True, "sliding_window": 7}
    assert windows(**used, max_window_layers=3) == (None, None, None, 7)
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    assert windows(**used, layer_types=kinds) == (7, None, 7, None)


def test_tensors_have_the_names_and_shapes_of_transformers() -> None:
    spec = parsed(num_key_value_heads=2, num_hidden_layers=1, attention_bias=True)
    shapes = {tensor.name.removeprefix("model."): tensor.shape for tensor in spec.tensors()}
    assert shapes == {
        "embed_tokens.weight": (100, 64),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (64, 64),
        "layers.0.self_attn.k_proj.weight": (16, 64),
        "layers.0.self_attn.v_proj.weight": (16, 64),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.self_attn.q_proj.bias": (64,),
        "layers.0.self_attn.k_proj.bias": (16,),
        "layers.0.self_attn.v_proj.bias": (16,),
        "layers.0.self_attn.o_proj.bias": (64,),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (100, 64),
    }
    assert (spec.layers[0].attention.qkv.output_count, spec.vocabulary_size) == (96, 100)


def test_rope_is_read_in_both_generations() -> None:
    new = parsed(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0})
    old = parsed(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=7.0)
    assert rope(new) == rope(old)
    assert rope(new).scaling == LinearScaling(2.0)


def test_the_original_length_may_stand_outside_of_the_scaling() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    inside = rope(parsed(rope_scaling={**scaling, "original_max_position_embeddings": 99}))
    outside = rope(parsed(rope_scaling=scaling, original_max_position_embeddings=99))
    assert isinstance(inside.scaling, YarnScaling)
    assert inside.scaling.original_length == 99
    assert inside == outside


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
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
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
        ({"vocab_size": None}, "vocab_size is null"),
        ({"hidden_size": "64"}, 'hidden_size is "64"'),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"architectures": []}, "architectures"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks rope_scaling.factor"),
        ({"rope_scaling": "linear"}, 'rope_scaling is "linear"'),
    ],
)
def test_what_makes_no_sense_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointInvalid, match=words):
        parsed(**changes)

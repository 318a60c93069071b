"""Our decoders against transformers on the same random weights, position by position."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.loaded_decoder import Loaded
from tests.support.tiny_llama import (
    MAX_LENGTH,
    VOCABULARY,
    llama,
    mistral,
    qwen2,
    qwen3,
    reference_logits,
    save,
)
from tests.support.tiny_spec import (
    save_random,
    tiny_spec,
    with_attention,
    with_head_norms,
    with_layers,
)
from worker_service.domain.capability import DataType
from worker_service.layers.linear import DenseLinear, PackedLinear, make_linear
from worker_service.model.registry import describe
from worker_service.model.spec import DecoderSpec, LayerSpec
from worker_service.runner.compiled_executor import COMPILED
from worker_service.runner.executor import ExecutorType
from worker_service.runner.kv_cache import bytes_per_block, layer_groups
from worker_service.runner.selection import EXECUTORS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()


by_executor = pytest.mark.parametrize("kind", EXECUTORS, ids=str)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "grouped": llama,
    "multi-head": lambda: llama(num_key_value_heads=6),
    "multi-query": lambda: llama(num_key_value_heads=1),
    "head-dim": lambda: llama(head_dim=20),
    "tied": lambda: llama(tie_word_embeddings=True),
    "biased": lambda: llama(attention_bias=True, mlp_bias=True),
    "epsilon": lambda: llama(rms_norm_eps=0.3),
    "theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 523.0}),
    "linear": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 3.0}),
    "dynamic": lambda: llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    "llama3": lambda: llama(rope_parameters=LLAMA3),
    "yarn": lambda: llama(rope_parameters=YARN),
    "yarn-mscale": lambda: llama(
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 20.0}
    ),
    "yarn-factor": lambda: llama(
        rope_parameters={**YARN, "attention_factor": 1.9, "truncate": False}
    ),
    "mistral": lambda: mistral(sliding_window=None),
    "mistral-window": lambda: mistral(sliding_window=13),
    "qwen2": qwen2,
    "qwen2-window": lambda: qwen2(
        use_sliding_window=True, sliding_window=11, max_window_layers=1, tie_word_embeddings=True
    ),
}


@pytest.mark.parametrize("name", MODELS)
@by_executor
def test_logits_equal_transformers_at_every_position(
    name: str, kind: ExecutorType, tmp_path: Path
) -> None:
    reference = MODELS[name]()
    loaded = Loaded(save(reference, tmp_path), kind)
    tokens = prompt(90)
    expected = reference_logits(reference, tokens)
    whole = loaded.logits(tokens, [90])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=2e-4)
    chunked = loaded.logits(tokens, [1, 2, 16, 1, 1, 40, 28, 1])
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["grouped", "multi-head", "biased", "mistral-window"])
def test_chunks_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    loaded = Loaded(save(MODELS[name](), tmp_path), COMPILED)
    tokens = prompt(150)
    whole = loaded.logits(tokens, [150])
    for chunks in ([75, 75], [1, 149], [33, 1, 1, 1, 114], [16] * 9 + [6]):
        assert torch.equal(loaded.logits(tokens, chunks), whole)


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("theta", {"rope_theta": 523.0}),
        ("linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 3.0}}),
        ("llama3", {"rope_scaling": LLAMA3}),
        ("yarn", {"rope_scaling": {**YARN, "rope_theta": 10000.0}}),
    ],
)
def test_folders_of_older_transformers_mean_the_same(
    name: str, old: dict[str, Any], tmp_path: Path
) -> None:
    reference = MODELS[name]()
    folder = save(reference, tmp_path, rope_parameters=None, **old)
    tokens = prompt(60)
    torch.testing.assert_close(
        Loaded(folder).logits(tokens, [60]),
        reference_logits(reference, tokens),
        rtol=1e-4,
        atol=2e-4,
    )


@by_executor
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_dynamic_scaling_follows_token_by_token_decoding_past_the_original_length(
    kind: ExecutorType, tmp_path: Path
) -> None:
    """Past it, transformers' result depends on a prompt's cuts; ours is that of single steps."""
    original = 24
    reference = llama(
        max_position_embeddings=original,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    loaded = Loaded(save(reference, tmp_path), kind)
    tokens = prompt(48)
    rows, cache = [], None
    with torch.inference_mode():
        for token in tokens:
            out = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, 0])
    expected = torch.stack(rows)
    torch.testing.assert_close(loaded.logits(tokens, [48]), expected, rtol=1e-3, atol=1e-3)
    plain = llama(max_position_embeddings=original)
    assert (reference_logits(plain, tokens)[original:] - expected[original:]).abs().max() > 0.1


@by_executor
def test_norms_of_heads_equal_transformers(kind: ExecutorType, tmp_path: Path) -> None:
    reference = qwen3()
    folder = save(reference, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    spec = with_head_norms(
        describe({**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    tokens = prompt(40)
    torch.testing.assert_close(
        Loaded(folder, kind, spec).logits(tokens, [17, 1, 22]),
        reference_logits(reference, tokens),
        rtol=1e-4,
        atol=2e-4,
    )


def with_part_rotated(spec: DecoderSpec, rotary_dim: int) -> DecoderSpec:
    return with_attention(
        spec,
        lambda _, own: replace(own, rope=own.rope and replace(own.rope, rotary_dim=rotary_dim)),
    )


def test_executors_agree_on_heads_that_are_rotated_in_part(tmp_path: Path) -> None:
    whole = tiny_spec(max_position_embeddings=MAX_LENGTH)
    folder, spec = save_random(whole, tmp_path), with_part_rotated(whole, 4)
    tokens = [token % 32 for token in prompt(60)]
    compiled, torch_, reference = (
        Loaded(folder, kind, spec).logits(tokens, [50, 1, 9]) for kind in EXECUTORS
    )
    torch.testing.assert_close(compiled, reference, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch_, reference, rtol=1e-4, atol=1e-5)
    entirely = Loaded(folder, COMPILED, whole).logits(tokens, [60])
    assert (entirely - compiled).abs().max() > 1e-3


def test_layers_may_differ_in_shape(tmp_path: Path) -> None:
    """Each with heads, KV heads, a window and a feed-forward block of its own."""
    mixed = with_layers(tiny_spec(), own_shapes)
    groups = layer_groups(mixed, DataType.FLOAT32)
    assert [(g.layer_indices, g.kv_head_count, g.window_token_count) for g in groups] == [
        ((0,), 1, None),
        ((1,), 2, 13),
    ]
    assert bytes_per_block(groups, 16) == 2 * 16 * 4 * (8 + 2 * 8)
    folder = save_random(mixed, tmp_path)
    tokens = [token % 32 for token in prompt(60)]
    _, torch_, reference = EXECUTORS
    expected = Loaded(folder, reference, mixed).logits(tokens, [60])
    for chunks in ([60], [7, 1, 1, 40, 11]):
        got = Loaded(folder, torch_, mixed).logits(tokens, chunks)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def own_shapes(index: int, layer: LayerSpec) -> LayerSpec:
    """Layer 1: twice the heads, a window, and a wider feed-forward block than layer 0."""
    if index == 0:
        return layer
    wide = tiny_spec(
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40
    ).layers[index]
    heads = replace(wide.attention.heads, window=13)
    return replace(wide, attention=replace(wide.attention, heads=heads))


@by_executor
def test_only_the_wanted_logits_are_computed(kind: ExecutorType, tmp_path: Path) -> None:
    loaded = Loaded(save(llama(), tmp_path), kind)
    tokens = prompt(20)
    whole = loaded.logits(tokens, [20])
    assert torch.equal(loaded.run(tokens, 0, [19, 4]), whole[[19, 4]])
    assert loaded.run(tokens, 0, []).shape == (0, VOCABULARY)


def test_a_checkpoint_in_several_files_loads_alike(tmp_path: Path) -> None:
    reference = llama()
    whole = Loaded(save(reference, tmp_path / "one"))
    reference.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    tokens = prompt(12)
    assert torch.equal(Loaded(tmp_path / "many").logits(tokens, [12]), whole.logits(tokens, [12]))


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_projection_keeps_each_rows_bits(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 48, generator=generator)
    offset = torch.randn(96, generator=generator) if bias else None
    linear = make_linear(weight, offset, shared=False)
    assert isinstance(linear, PackedLinear)
    x = torch.randn(70, 48, generator=generator)
    with torch.inference_mode():
        whole = linear(x)
        torch.testing.assert_close(whole, DenseLinear(weight, offset)(x), rtol=1e-5, atol=1e-4)
        for rows in (1, 2, 3, 8, 31, 33, 64):
            assert torch.equal(linear(x[-rows:]), whole[-rows:])
    assert linear.byte_count == weight.nbytes + (0 if offset is None else offset.nbytes)


def test_other_dtypes_are_not_packed_and_own_their_memory() -> None:
    weight = torch.randn(8, 4).to(torch.bfloat16)
    linear = make_linear(weight, None, shared=False)
    x = torch.randn(2, 4).to(torch.bfloat16)
    before = linear(x)
    weight.zero_()
    assert torch.equal(linear(x), before)

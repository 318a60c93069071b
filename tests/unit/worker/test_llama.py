"""Our decoder against transformers on the same random weights, position by position."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support.tiny_llama import (
    MAX_LENGTH,
    VOCABULARY,
    llama,
    mistral,
    qwen2,
    reference_logits,
    save,
)
from worker_service.attention.interface import AttentionBatch, AttentionConfig, LayerCache
from worker_service.attention.torch_backend import TORCH
from worker_service.layers.linear import DenseLinear, PackedLinear, make_linear
from worker_service.model.config import parse_config
from worker_service.model.registry import load_model
from worker_service.weights.checkpoint import Checkpoint

BLOCK_SIZE = 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Loaded:
    """A model from a folder with one sequence's cache, driven without a runner."""

    def __init__(self, folder: Path) -> None:
        device, dtype = torch.device("cpu"), torch.float32
        with torch.inference_mode(), Checkpoint(folder) as checkpoint:
            config = parse_config(checkpoint.config)
            self.model = load_model(
                checkpoint, config, MAX_LENGTH, dtype, device, progress=lambda line: None
            )
        self.block_count = MAX_LENGTH // BLOCK_SIZE
        size = (self.block_count + 1, BLOCK_SIZE, config.kv_head_count, config.head_dim)
        caches = tuple(
            LayerCache(torch.zeros(size), torch.zeros(size)) for _ in range(config.layer_count)
        )
        attention = AttentionConfig(
            config.head_count,
            config.kv_head_count,
            config.head_dim,
            config.head_dim**-0.5,
            config.layer_windows,
            BLOCK_SIZE,
            MAX_LENGTH,
            dtype,
            device,
        )
        self.backend = TORCH.build(attention, caches)

    def logits(self, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary], computed in the given chunks."""
        parts, start = [], 0
        for chunk in chunks:
            positions = np.arange(start, start + chunk, dtype=np.int32)
            attention = self.backend.plan(
                AttentionBatch(
                    query_lengths=np.array([chunk], dtype=np.int32),
                    query_starts=np.array([0, chunk], dtype=np.int32),
                    context_lengths=np.array([start + chunk], dtype=np.int32),
                    block_tables=np.arange(1, self.block_count + 1, dtype=np.int32)[None],
                    slots=positions + np.int32(BLOCK_SIZE),
                )
            )
            with torch.inference_mode():
                parts.append(
                    self.model.forward(
                        torch.tensor(tokens[start : start + chunk]),
                        torch.from_numpy(positions.astype(np.int64)),
                        attention,
                        torch.arange(chunk),
                    )
                )
            start += chunk
        assert start == len(tokens)
        return torch.cat(parts)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()


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
def test_logits_equal_transformers_at_every_position(name: str, tmp_path: Path) -> None:
    reference = MODELS[name]()
    loaded = Loaded(save(reference, tmp_path))
    tokens = prompt(90)
    expected = reference_logits(reference, tokens)
    whole = loaded.logits(tokens, [90])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=2e-4)
    chunked = loaded.logits(tokens, [1, 2, 16, 1, 1, 40, 28, 1])
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["grouped", "multi-head", "biased", "mistral-window"])
def test_chunks_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    loaded = Loaded(save(MODELS[name](), tmp_path))
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


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_dynamic_scaling_follows_token_by_token_decoding_past_the_original_length(
    tmp_path: Path,
) -> None:
    """Past it, transformers' result depends on a prompt's cuts; ours is that of single steps."""
    original = 24
    reference = llama(
        max_position_embeddings=original,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    loaded = Loaded(save(reference, tmp_path))
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


def test_only_the_wanted_logits_are_computed(tmp_path: Path) -> None:
    loaded = Loaded(save(llama(), tmp_path))
    tokens = prompt(20)
    whole = loaded.logits(tokens, [20])
    step = loaded.backend.plan(
        AttentionBatch(
            np.array([20], dtype=np.int32),
            np.array([0, 20], dtype=np.int32),
            np.array([20], dtype=np.int32),
            np.arange(1, 5, dtype=np.int32)[None],
            np.arange(BLOCK_SIZE, BLOCK_SIZE + 20, dtype=np.int32),
        )
    )
    ids, positions = torch.tensor(tokens), torch.arange(20)
    with torch.inference_mode():
        some = loaded.model.forward(ids, positions, step, torch.tensor([19, 4]))
        none = loaded.model.forward(ids, positions, step, torch.tensor([], dtype=torch.int64))
    assert torch.equal(some, whole[[19, 4]])
    assert none.shape == (0, VOCABULARY)


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

"""Our decoder against transformers on the same random weights, position by position."""

from __future__ import annotations

import math
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
from worker_service.attention.interface import AttentionConfig
from worker_service.domain.capability import DataType, Limits
from worker_service.layers.linear import DenseLinear, PackedLinear, make_linear
from worker_service.model.config import parse_config
from worker_service.runner.forward_pass import PassConfig
from worker_service.runner.input_batch import InputBatch
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.options import Quantization
from worker_service.runner.selection import PASSES, select_pass
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
    """A model from a folder with one sequence's cache, driven without a runner.

    Its blocks hold NaN where nothing is written, if the pass promises not to look there.
    """

    def __init__(self, folder: Path, backend: str = "torch") -> None:
        device = torch.device("cpu")
        self.block_count = MAX_LENGTH // BLOCK_SIZE
        with torch.inference_mode(), Checkpoint(folder) as checkpoint:
            config = parse_config(checkpoint.config)
            attention = AttentionConfig(
                config.head_count,
                config.kv_head_count,
                config.head_dim,
                config.head_dim**-0.5,
                config.layer_windows,
                BLOCK_SIZE,
                MAX_LENGTH,
                torch.float32,
                device,
            )
            pass_config = PassConfig(
                attention=attention,
                limits=Limits(MAX_LENGTH, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH),
                quantization=Quantization.NONE,
                kv_data_type=DataType.FLOAT32,
                thread_count=2,
                progress=lambda line: None,
            )
            cache = KVCache(config, self.block_count + 1, BLOCK_SIZE, DataType.FLOAT32, device)
            unwritten = math.nan if backend == "compiled" else 0.0
            for layer in cache.layers:
                layer.keys.fill_(unwritten)
                layer.values.fill_(unwritten)
            chosen = select_pass(pass_config, backend)
            self.forward_pass = chosen.build(pass_config, config, checkpoint, cache)

    def run(self, tokens: list[int], start: int, wanted: list[int]) -> torch.Tensor:
        """float32 [wanted, vocabulary] of one step of `tokens` from position `start` on."""
        count = len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        zero = np.zeros(len(wanted), dtype=np.int32)
        with torch.inference_mode():
            return self.forward_pass.run(
                InputBatch(
                    rows=zero[:1],
                    query_lengths=np.array([count], dtype=np.int32),
                    query_starts=np.array([0, count], dtype=np.int32),
                    context_lengths=np.array([start + count], dtype=np.int32),
                    token_ids=np.array(tokens, dtype=np.int32),
                    positions=positions,
                    slots=positions + np.int32(BLOCK_SIZE),
                    block_tables=np.arange(1, self.block_count + 1, dtype=np.int32)[None],
                    logit_indices=np.array(wanted, dtype=np.int32),
                    sampled_rows=zero,
                    sampled_positions=zero,
                )
            ).clone()

    def logits(self, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary], computed in the given chunks."""
        parts, start = [], 0
        for chunk in chunks:
            parts.append(self.run(tokens[start : start + chunk], start, list(range(chunk))))
            start += chunk
        assert start == len(tokens)
        return torch.cat(parts)


def prompt(length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, VOCABULARY, length).tolist()


BACKENDS = [kind.name for kind in PASSES]
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
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_equal_transformers_at_every_position(
    name: str, backend: str, tmp_path: Path
) -> None:
    reference = MODELS[name]()
    loaded = Loaded(save(reference, tmp_path), backend)
    tokens = prompt(90)
    expected = reference_logits(reference, tokens)
    whole = loaded.logits(tokens, [90])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=2e-4)
    chunked = loaded.logits(tokens, [1, 2, 16, 1, 1, 40, 28, 1])
    torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["grouped", "multi-head", "biased", "mistral-window"])
def test_chunks_do_not_change_a_bit(name: str, tmp_path: Path) -> None:
    loaded = Loaded(save(MODELS[name](), tmp_path), "compiled")
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_dynamic_scaling_follows_token_by_token_decoding_past_the_original_length(
    backend: str, tmp_path: Path
) -> None:
    """Past it, transformers' result depends on a prompt's cuts; ours is that of single steps."""
    original = 24
    reference = llama(
        max_position_embeddings=original,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    loaded = Loaded(save(reference, tmp_path), backend)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_wanted_logits_are_computed(backend: str, tmp_path: Path) -> None:
    loaded = Loaded(save(llama(), tmp_path), backend)
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

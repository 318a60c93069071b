"""Ranks in processes of their own generate what one rank does, and what transformers would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tests.golden.references import Reference, load_references
from tests.support import runner_rig, tiny_llama
from tests.support.rank_processes import Rank, Replica, coordinates
from tests.support.runner_rig import RunnerRig
from twinplane import models
from worker_service.domain.capability import DeviceKind
from worker_service.domain.plan import GrammarMasks, OutputKind
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.load import check_load

pytestmark = pytest.mark.slow

CLOSE = 1e-3  # two logits nearer than this may change places
COUNT = 12
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
SAMPLING = [SamplingParameters(0.9, 20 * (row % 2), 0.95, 0.0, row) for row in range(6)]


@dataclass(frozen=True)
class Case:
    make: Callable[..., PreTrainedModel]
    changes: dict[str, Any]
    layouts: tuple[tuple[int, int], ...] = ((2, 1), (1, 2), (2, 2))


CASES = {
    "llama": Case(tiny_llama.llama, {}),
    "llama-biased-tied": Case(
        tiny_llama.llama,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-uneven": Case(
        tiny_llama.llama,
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
        ((2, 1), (2, 2), (3, 1)),
    ),
    "llama-one-kv-head": Case(tiny_llama.llama, {"num_key_value_heads": 1}, ((2, 1), (4, 1))),
    "qwen2": Case(tiny_llama.qwen2, {}),
    "mistral": Case(tiny_llama.mistral, {"sliding_window": 9}, ((2, 1), (1, 3), (2, 2))),
}


def assert_near(model: PreTrainedModel, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """transformers would choose each token behind our own tokens, up to near ties."""
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = tiny_llama.reference_logits(model, prompt + output)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
        assert ((logits.max(dim=-1).values - chosen) <= CLOSE).all()


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens_equal_one_ranks(name: str, rank_pool: list[Rank], tmp_path: Path) -> None:
    """Prompts longer than a chunk and a block, mixed with decoding. Stages alone change no bit, so
    seeded draws are the same, too."""
    case = CASES[name]
    model = case.make(**case.changes)
    folder = tiny_llama.save(model, tmp_path)
    one = runner_rig.build(folder, executor="torch", thread_count=1)
    prompts = tiny_llama.PROMPTS
    expected = runner_rig.generate(one, prompts, COUNT, chunk=16, lag=1)
    drawn = runner_rig.generate(one, prompts, COUNT, SAMPLING, chunk=16)
    for tensor, pipeline in case.layouts:
        replica = Replica.load(rank_pool, folder, tensor, pipeline)
        outputs = runner_rig.generate(replica, prompts, COUNT, chunk=16, lag=1)
        assert_near(model, prompts, outputs)
        if tensor == 1:
            assert outputs == expected
            assert runner_rig.generate(replica, prompts, COUNT, SAMPLING, chunk=16) == drawn


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_held_rows_are_sampled_once(
    tensor: int, pipeline: int, rank_pool: list[Rank], tmp_path: Path
) -> None:
    """Masks, a mask that allows nothing, and a row that goes on behind a sampled token."""
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path)
    one = runner_rig.build(folder, executor="torch", thread_count=1)
    replica = Replica.load(rank_pool, folder, tensor, pipeline)
    told = []
    for runner in (one, replica):
        rig = RunnerRig(runner)
        rig.add(0, tiny_llama.PROMPTS[0], output=OutputKind.HOLD)
        rig.add(1, tiny_llama.PROMPTS[2], output=OutputKind.HOLD)
        rig.add(2, tiny_llama.PROMPTS[5])
        step = rig.step({row: rig.remaining(row) for row in range(3)})
        bits = np.zeros((2, 5), dtype=np.uint32)
        bits[0, 1] = 0b1000  # token 35 and no other
        masks = GrammarMasks(runner_rig.column((0, 1)), bits)
        sampled = rig.sample((0, 1), masks)
        ahead = rig.step({0: rig.remaining(0), 2: rig.remaining(2)})
        told.append(
            (
                (step.rows.tolist(), step.tokens.tolist(), step.held_rows.tolist()),
                (sampled.rows.tolist(), sampled.tokens.tolist()),
                [(fault.row, fault.kind) for fault in sampled.faults],
                (ahead.rows.tolist(), ahead.tokens.tolist(), ahead.held_rows.tolist()),
            )
        )
    assert told[0] == told[1]
    assert told[0][1] == ([0], [35]) and [row for row, _ in told[0][2]] == [1]


def test_what_a_rank_says_of_itself(rank_pool: list[Rank], tmp_path: Path) -> None:
    """All have the same blocks and weights; the first has an address; memory is split."""
    folder = tiny_llama.save(
        tiny_llama.llama(num_key_value_heads=3, num_attention_heads=6), tmp_path
    )
    one = runner_rig.build(folder, executor="torch", thread_count=1)
    replica = Replica.load(rank_pool, folder, 2, 2)
    known = [rank.call("capability") for rank in replica.ranks]
    assert [each.ranks.rank for each in known] == [0, 1, 2, 3]
    assert [bool(each.rendezvous_address) for each in known] == [True, False, False, False]
    assert {each.executor for each in known} == {"torch"}  # the compiled one runs whole models
    assert {each.weight_version for each in known} == {one.capability().weight_version}
    assert len({each.arithmetic for each in known}) == 1
    assert known[0].arithmetic != one.capability().arithmetic
    assert {each.device.kind for each in known} == {DeviceKind.CPU}
    pools, whole = replica.memory_pools(), one.memory_pool()
    assert len({pool.block_count for pool in pools}) == 1
    assert sum(pool.bytes_per_block for pool in pools) == whole.bytes_per_block
    assert [pool.layer_groups[0].kv_head_count for pool in pools] == [2, 1, 2, 1]
    assert [pool.layer_groups[0].layer_indices for pool in pools] == [(0, 1), (0, 1), (2,), (2,)]
    assert all(pool.weights_bytes < whole.weights_bytes / 2 for pool in pools)
    for index, pool in enumerate(pools):  # what was said before anything was read
        options = runner_rig.options(folder, ranks=coordinates(index, 2, 2), thread_count=1)
        planned = check_load(options).memory
        assert (planned.weights_bytes, planned.kv_bytes) == (pool.weights_bytes, pool.kv_bytes)
    assert pools[0].kv_bytes <= 4 << 20 < whole.bytes_per_block + whole.kv_bytes


@pytest.mark.model
@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_the_default_model(tensor: int, pipeline: int, rank_pool: list[Rank]) -> None:
    """9 query heads over 3 KV heads, so two tensor ranks have 6 and 3."""
    folder = models.resolve("smollm2-135m-instruct")
    replica = Replica.load(
        rank_pool, folder, tensor, pipeline, block_size=16, kv_cache_bytes=64 << 20
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    references = load_references()
    chosen = [references[number] for number in (1, 20, 33, 52)]
    assert tokenizer.encode("The capital of France is").ids == list(chosen[0].prompt)
    outputs = runner_rig.generate(replica, [each.prompt for each in chosen], COUNT, chunk=64)
    differences = [disagreement(each, out) for each, out in zip(chosen, outputs, strict=True)]
    assert differences == [None] * len(chosen)


def disagreement(reference: Reference, tokens: list[int]) -> str | None:
    count = len(tokens)
    short = Reference(
        reference.kind, reference.prompt, reference.tokens[:count], reference.gaps[:count]
    )
    return short.disagreement(tokens)

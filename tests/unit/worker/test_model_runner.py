"""The runner on small random models: every way of scheduling gives the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import runner_rig, tiny_llama
from tests.support.runner_rig import GREEDY, RunnerRig, column, generate
from tests.support.tiny_llama import PROMPTS, VOCABULARY
from worker_service.domain.capability import Feature
from worker_service.domain.errors import PlanInvalid, PlanMismatch, RowNotHeld
from worker_service.domain.plan import GrammarMasks, OutputKind, RowFaultKind
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.model_runner import ModelRunner

SAMPLED = [
    SamplingParameters(1.0, 0, 1.0, 0.0, 2**64 - 1),
    SamplingParameters(0.0, 0, 1.0, 0.0, 1),
    SamplingParameters(0.8, 20, 1.0, 0.0, 2),
    SamplingParameters(1.2, 0, 0.9, 0.0, 3),
    SamplingParameters(0.9, 50, 0.8, 0.05, 4),
    SamplingParameters(1.5, 0, 1.0, 0.1, 5),
]
COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return runner_rig.build(folder)


def test_greedy_tokens_equal_transformers(runner: ModelRunner) -> None:
    reference = tiny_llama.llama()
    for prompt, output in zip(PROMPTS, generate(runner, PROMPTS, COUNT), strict=True):
        tokens = list(prompt)
        for token in output:
            logits = tiny_llama.reference_logits(reference, tokens)[-1]
            highest, second = logits.topk(2).values.tolist()
            if highest - second > 1e-3:
                assert token == int(logits.argmax())
            tokens.append(token)


@pytest.mark.parametrize("sampling", [[GREEDY] * len(PROMPTS), SAMPLED], ids=["greedy", "sampled"])
def test_company_and_chunks_change_no_token(
    runner: ModelRunner, sampling: list[SamplingParameters]
) -> None:
    expected = [
        generate(runner, [prompt], COUNT, [own])[0]
        for prompt, own in zip(PROMPTS, sampling, strict=True)
    ]
    for chunk, lag in ((1 << 20, 0), (16, 0), (5, 2), (1, 1), (1 << 20, 3)):
        assert generate(runner, PROMPTS, COUNT, sampling, chunk, lag) == expected


def test_the_reference_backend_gives_the_same_tokens(runner: ModelRunner, folder: Path) -> None:
    reference = runner_rig.build(folder, attention_backend="reference", block_size=8)
    assert reference.capability().attention_backend == "reference"
    assert generate(reference, PROMPTS, 6, chunk=9) == generate(runner, PROMPTS, 6)


def test_another_seed_gives_other_tokens(runner: ModelRunner) -> None:
    def with_seed(seed: int) -> list[list[int]]:
        return generate(runner, PROMPTS[:1], COUNT, [SamplingParameters(1.0, 0, 1.0, 0.0, seed)])

    assert with_seed(1) == with_seed(1)
    assert with_seed(1) != with_seed(2)


def test_a_resumed_sequence_goes_on_as_if_nothing_had_happened(runner: ModelRunner) -> None:
    """The token log alone suffices: preempted, its blocks given away, added whole again."""
    sampling = SAMPLED[0]
    expected = generate(runner, PROMPTS[:1], COUNT, [sampling])[0]
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0], sampling)
    for _ in range(5):
        rig.step({0: rig.remaining(0)})
    log = rig.rows[0].tokens
    rig.remove(0)
    rig.add(3, PROMPTS[3])
    rig.step({3: 64})
    rig.add(1, log, sampling)
    while len(rig.rows[1].tokens) < len(PROMPTS[0]) + COUNT:
        rig.step({1: rig.remaining(1)})
    assert rig.rows[1].tokens == PROMPTS[0] + expected


def test_a_cached_prefix_is_not_computed_again(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], COUNT)[0]
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0])
    rig.step({0: 30})
    shared = rig.rows[0].blocks[:7]  # 28 of the 30 tokens
    rig.add(1, PROMPTS[0], blocks=shared, computed=28)
    rig.step({0: 1, 1: 2})
    for _ in range(COUNT - 1):
        rig.step({0: 1, 1: 1})
    assert rig.rows[1].tokens == PROMPTS[0] + expected
    assert rig.rows[0].tokens[: 30 + COUNT] == PROMPTS[0] + expected


def test_holding_and_sampling_equals_inline(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS, COUNT, SAMPLED)
    rig = RunnerRig(runner)
    for row, prompt in enumerate(PROMPTS):
        rig.add(row, prompt, SAMPLED[row], output=OutputKind.HOLD)
    for _ in range(COUNT):
        held = rig.step({row: rig.remaining(row) for row in range(len(PROMPTS))})
        assert (held.step_id, held.rows.size, held.tokens.size) == (rig.step_id, 0, 0)
        rig.sample(held.held_rows.tolist())
    for row, prompt in enumerate(PROMPTS):
        assert rig.rows[row].tokens == prompt + expected[row]


def test_masks_restrict_their_rows(runner: ModelRunner) -> None:
    rig = RunnerRig(runner)
    for row in range(3):
        rig.add(row, PROMPTS[row])
    free = rig.step({0: 30, 1: 1, 2: 7})
    rig = RunnerRig(runner)
    for row in range(3):
        rig.add(row, PROMPTS[row], output=OutputKind.HOLD)
    rig.step({0: 30, 1: 1, 2: 7})
    bitmasks = np.zeros((2, -(-VOCABULARY // 32)), dtype=np.uint32)
    bitmasks[0, 130 // 32] = 1 << 130 % 32
    result = rig.sample([0, 1, 2], GrammarMasks(column([2, 0]), bitmasks))
    assert result.rows.tolist() == [1, 2]
    assert result.tokens.tolist() == [free.tokens[1], 130]
    assert result.token_counts.tolist() == [1, 1]
    assert [(fault.row, fault.kind) for fault in result.faults] == [(0, RowFaultKind.EMPTY_MASK)]


def test_a_held_row_waits_while_the_others_go_on(runner: ModelRunner) -> None:
    """Its logits outlive steps that use the runner's buffers again."""
    expected = generate(runner, PROMPTS[:3], COUNT, SAMPLED[:3])
    rig = RunnerRig(runner)
    for row, output in enumerate((OutputKind.SAMPLE, OutputKind.HOLD, OutputKind.SAMPLE)):
        rig.add(row, PROMPTS[row], SAMPLED[row], output=output)
    step = rig.step({row: rig.remaining(row) for row in range(3)})
    assert (step.rows.tolist(), step.held_rows.tolist()) == ([0, 2], [1])
    held = rig.step_id
    for _ in range(COUNT - 1):
        rig.step({0: 1, 2: 1})
    sampled = rig.sample([1], step_id=held)
    assert (sampled.step_id, sampled.tokens.tolist()) == (held, expected[1][:1])
    for row in (0, 2):
        assert rig.rows[row].tokens == PROMPTS[row] + expected[row]
    with pytest.raises(RowNotHeld):
        rig.sample([1], step_id=held)


def test_masks_that_do_not_fit_are_refused_and_the_row_stays_held(runner: ModelRunner) -> None:
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0], output=OutputKind.HOLD)
    rig.add(2, PROMPTS[2], output=OutputKind.HOLD)
    rig.step({0: 30, 2: 3})  # row 2 does not reach its end: it is not held
    words = -(-VOCABULARY // 32)
    for rows, width, field in (
        ([2], words, "grammar_masks.rows"),
        ([0, 0], words, "grammar_masks.rows"),
        ([9], words, "grammar_masks.rows"),
        ([0], words + 1, "grammar_masks.bitmasks"),
        ([0], words - 1, "grammar_masks.bitmasks"),
    ):
        bitmasks = np.full((len(rows), width), 0xFFFFFFFF, dtype=np.uint32)
        with pytest.raises(PlanInvalid) as raised:
            rig.sample([0], GrammarMasks(column(rows), bitmasks))
        assert raised.value.field_path == field
    with pytest.raises(RowNotHeld):
        rig.sample([0, 2])
    assert rig.sample([0]).rows.tolist() == [0]


def test_a_row_without_output_computes_the_kv_only(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], 1)[0]
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0], output=OutputKind.NONE)
    result = rig.step({0: 30})
    assert result.rows.size == result.held_rows.size == 0
    rig.add(1, PROMPTS[0], blocks=rig.rows[0].blocks[:7], computed=28)
    assert rig.step({1: 2}).tokens.tolist() == expected


def test_a_step_may_only_remove(runner: ModelRunner) -> None:
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0])
    rig.step({0: 30})
    assert runner.memory_pool().used_block_count == 8
    rig.remove(0)
    result = rig.step({})
    assert (result.step_id, result.rows.size) == (2, 0)
    assert runner.memory_pool().used_block_count == 0


def test_a_refused_plan_changes_nothing(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], 3)[0]
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0])
    plan = rig.plan({0: 30})
    wrong = replace(plan, scheduled=replace(plan.scheduled, start_positions=column([1])))
    with pytest.raises(PlanMismatch):
        runner.launch(wrong)
    assert runner.memory_pool().used_block_count == 0
    rig.take(runner.launch(plan).result())
    rig.rows[0].computed = 30
    for _ in range(2):
        rig.step({0: 1})
    assert rig.rows[0].tokens == PROMPTS[0] + expected


@pytest.mark.parametrize("name", ["draft_counts", "literal_draft_counts", "open_step_distances"])
def test_drafts_are_refused_by_a_runner_without_a_drafter(runner: ModelRunner, name: str) -> None:
    assert Feature.DRAFT_VERIFICATION not in runner.capability().features
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0])
    plan = rig.plan({0: 30})
    with pytest.raises(PlanInvalid) as raised:
        runner.launch(replace(plan, scheduled=replace(plan.scheduled, **{name: column([1])})))
    assert raised.value.field_path == f"plan.scheduled.{name}"
    assert runner.launch(plan).result().rows.tolist() == [0]


def test_reset_forgets_rows_and_what_they_hold(runner: ModelRunner) -> None:
    expected = generate(runner, PROMPTS[:1], 2)
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[3], output=OutputKind.HOLD)
    assert rig.step({0: rig.remaining(0)}).held_rows.tolist() == [0]
    runner.reset()
    with pytest.raises(RowNotHeld):
        rig.sample([0])
    assert runner.memory_pool().used_block_count == 0
    assert generate(runner, PROMPTS[:1], 2) == expected


POISON = 99  # a token whose embedding is not a number


@pytest.fixture(scope="module")
def poisoned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    copy = tmp_path_factory.mktemp("poisoned")
    (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = math.nan
    save_file(weights, copy / "model.safetensors")
    return runner_rig.build(copy)


@pytest.mark.parametrize("chunk", [1 << 20, 2])
def test_invalid_logits_fault_their_row_and_nobody_else(poisoned: ModelRunner, chunk: int) -> None:
    """Not the rows beside it, not those that take its blocks next; chunks do not hide it."""
    safe = [[token for token in prompt if token != POISON] for prompt in PROMPTS[:3]]
    expected = [generate(poisoned, [prompt], 2)[0] for prompt in safe]
    rig = RunnerRig(poisoned)
    rig.add(0, [POISON, 1, 2, 3, 4, 5])
    for row, prompt in enumerate(safe, start=1):
        rig.add(row, prompt)
    faults = []
    while rig.remaining(0):
        counts = {row: min(chunk, rig.remaining(row)) for row in rig.rows if rig.remaining(row)}
        faults += rig.step(counts).faults
    assert [(fault.row, fault.kind) for fault in faults] == [(0, RowFaultKind.INVALID_LOGITS)]
    rig.remove(0)
    rig.add(4, safe[0])  # into the blocks that row 0 leaves full of NaN
    while (
        any(len(rig.rows[row].tokens) < len(safe[row - 1]) + 2 for row in (1, 2, 3))
        or len(rig.rows[4].tokens) < len(safe[0]) + 2
    ):
        counts = {row: min(chunk, rig.remaining(row)) for row in rig.rows}
        assert not rig.step(counts).faults
    for row in (1, 2, 3):
        assert rig.rows[row].tokens[: len(safe[row - 1]) + 2] == safe[row - 1] + expected[row - 1]
    assert rig.rows[4].tokens[: len(safe[0]) + 2] == safe[0] + expected[0]


def test_windows_are_layer_groups(tmp_path: Path) -> None:
    model = tiny_llama.qwen2(use_sliding_window=True, sliding_window=9, max_window_layers=2)
    runner = runner_rig.build(tiny_llama.save(model, tmp_path))
    groups = runner.memory_pool().layer_groups
    assert [(group.layer_indices, group.window_token_count) for group in groups] == [
        ((0, 1), None),
        ((2,), 9),
    ]
    together = generate(runner, PROMPTS, COUNT, SAMPLED, chunk=11)
    assert together == [
        generate(runner, [prompt], COUNT, [sampling])[0]
        for prompt, sampling in zip(PROMPTS, SAMPLED, strict=True)
    ]


@pytest.mark.parametrize(
    "build", [tiny_llama.llama, lambda: tiny_llama.llama(tie_word_embeddings=True)]
)
def test_step_results_hold_plain_host_columns(build: Callable[[], Any], tmp_path: Path) -> None:
    runner = runner_rig.build(tiny_llama.save(build(), tmp_path))
    rig = RunnerRig(runner)
    rig.add(5, PROMPTS[2])
    result = rig.step({5: 7})
    for values in (result.rows, result.token_counts, result.tokens):
        assert values.dtype == np.int32
    assert result.rows.tolist() == [5]
    assert not torch.is_inference_mode_enabled()

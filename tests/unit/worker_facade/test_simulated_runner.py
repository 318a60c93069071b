"""The simulated runner: its tokens depend on every block they should, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_tokens import expected_tokens
from tests.support.worker_rig import MODEL, VOCABULARY, simulated_runner
from worker_service.domain.capability import Limits
from worker_service.domain.plan import AddedSequence, OutputKind, ScheduledRows, StepPlan
from worker_service.domain.sampling import SamplingParameters
from worker_service.simulated.runner import (
    SimulatedLatency,
    SimulatedModel,
    SimulatedRunner,
)

GREEDY = SamplingParameters(0.0, 0, 1.0, 0.0, 7)
SEEDED = SamplingParameters(1.0, 0, 1.0, 0.0, 7)


def column(values) -> np.ndarray:
    return np.array(list(values), dtype=np.int32)


def plan(step_id: int, added=(), rows=(), starts=(), counts=(), sources=None) -> StepPlan:
    zeros = column([0] * len(rows))
    return StepPlan(
        epoch=1,
        step_id=step_id,
        weight_version=simulated_runner().capability().weight_version,
        removed_rows=column(()),
        added=tuple(added),
        scheduled=ScheduledRows(
            rows=column(rows),
            start_positions=column(starts),
            token_counts=column(counts),
            source_step_distances=zeros if sources is None else column(sources),
            literal_token_counts=zeros,
            literal_tokens=column(()),
            appended_block_counts=zeros,
            appended_blocks=column(()),
        ),
        fingerprint=bytes,
    )


def sequence(row, prompt, blocks, sampling=GREEDY, computed=0) -> AddedSequence:
    return AddedSequence(
        row, column(prompt), len(prompt), sampling, OutputKind.SAMPLE, column(blocks), computed
    )


def sampled(runner, *arguments, **keywords) -> list[int]:
    return runner.launch(plan(*arguments, **keywords)).result().tokens.tolist()


prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30)


@given(prompts, st.data())
def test_tokens_do_not_depend_on_chunks_blocks_or_batch_mates(prompt, data) -> None:
    runner = simulated_runner()
    blocks = data.draw(st.permutations(range(1, 40)))
    chunks = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    mate = sequence(5, [3] * 8, range(50, 60), SEEDED)
    step_id, start = 1, 0
    got: list[int] = []
    while start < len(prompt):
        count = min(chunks[(step_id - 1) % len(chunks)], len(prompt) - start)
        added = [sequence(2, prompt, blocks[:10], SEEDED), mate] if start == 0 else []
        result = runner.launch(
            plan(step_id, added, [5, 2] if start == 0 else [2],
                 [0, start] if start == 0 else [start],
                 [8, count] if start == 0 else [count])
        ).result()  # fmt: skip
        got = result.tokens[result.rows == 2].tolist()
        start, step_id = start + count, step_id + 1
    for _ in range(5):
        got += sampled(runner, step_id, rows=[2], starts=[start], counts=[1], sources=[1])
        start, step_id = start + 1, step_id + 1
    assert got == expected_tokens(prompt, 6, SEEDED, VOCABULARY)


def test_only_draws_depend_on_the_seed() -> None:
    other = SamplingParameters(0.0, 0, 1.0, 0.0, 8)
    assert expected_tokens([1], 9, GREEDY, 1000) == expected_tokens([1], 9, other, 1000)
    other = SamplingParameters(1.0, 0, 1.0, 0.0, 8)
    assert expected_tokens([1], 9, SEEDED, 1000) != expected_tokens([1], 9, other, 1000)


def test_every_token_comes_up() -> None:
    tokens = expected_tokens([1], 2000, GREEDY, 101)
    assert set(tokens) == set(range(101))
    tokens = expected_tokens([1], 2000, GREEDY, 101, first_token=7)
    assert set(tokens) == set(range(7, 101))


PROMPT = list(range(9))
RIGHT = expected_tokens(PROMPT, 1, GREEDY, VOCABULARY)


def second_reader(blocks: list[int]) -> list[int]:
    """What a row samples that finds PROMPT's first 8 tokens in its first two blocks."""
    runner = simulated_runner()
    first = sequence(0, PROMPT, [7, 9, 10])
    assert sampled(runner, 1, [first], [0], [0], [9]) == RIGHT
    other = sequence(1, [5, 4, 3, 2, 1], [11, 12])
    sampled(runner, 2, [other], [1], [0], [5])
    again = sequence(2, PROMPT, blocks, computed=8)
    return sampled(runner, 3, [again], [2], [8], [1])


def test_a_cached_prefix_gives_the_same_token() -> None:
    assert second_reader([7, 9, 20]) == RIGHT


@pytest.mark.parametrize(
    "blocks",
    [
        [11, 9, 20],  # another's block
        [30, 9, 20],  # a block never written
        [7, 7, 20],  # one block twice
        [9, 7, 20],  # the right blocks in the wrong order
    ],
)
def test_a_wrong_block_changes_the_token(blocks: list[int]) -> None:
    assert second_reader(blocks) != RIGHT


def test_a_block_given_to_two_rows_changes_the_token() -> None:
    runner = simulated_runner()
    sampled(runner, 1, [sequence(0, PROMPT, [7, 9, 10])], [0], [0], [9])
    sampled(runner, 2, [sequence(1, [50] * 4, [9])], [1], [0], [4])
    (token,) = sampled(runner, 3, rows=[0], starts=[9], counts=[1], sources=[2])
    assert token != expected_tokens(PROMPT, 2, GREEDY, VOCABULARY)[1]


def test_the_latency_is_what_the_model_says() -> None:
    slept: list[float] = []
    runner = SimulatedRunner(
        MODEL,
        SimulatedLatency(step=1.0, token=0.1, row=0.01, kilotoken=1000.0),
        sleep=slept.append,
        clock=lambda: 0.0,
    )
    both = [sequence(0, PROMPT, [7, 9, 10]), sequence(1, PROMPT, [11, 12])]
    runner.launch(plan(1, both))
    assert slept == [], "a step that schedules nothing takes no time"
    runner.launch(plan(2, rows=[0, 1], starts=[0, 0], counts=[9, 3]))
    assert slept == [pytest.approx(1.0 + 0.1 * 12 + 0.01 * 2 + 12)]
    runner.launch(plan(3, rows=[0], starts=[9], counts=[1], sources=[1]))
    assert slept[1:] == [pytest.approx(1.0 + 0.1 + 0.01 + 10)]


def test_a_reset_frees_every_row() -> None:
    runner = simulated_runner()
    sampled(runner, 1, [sequence(0, PROMPT, [7, 9, 10])], [0], [0], [9])
    runner.reset()
    assert runner.memory_pool().used_block_count == 0
    assert sampled(runner, 1, [sequence(0, PROMPT, [7, 9, 10])], [0], [0], [9]) == RIGHT


def test_long_contexts_of_uneven_length_are_right() -> None:
    limits = Limits(4, 4096, 2048, 2048)
    model = SimulatedModel("long", 1000, limits, block_count=600, block_size=16)
    runner = SimulatedRunner(model, SimulatedLatency(0, 0, 0, 0))
    rng = np.random.default_rng(0)
    lengths = [1024, 1, 17, 1023]
    texts = [rng.integers(0, 1000, size=n).tolist() for n in lengths]
    added = [
        sequence(row, text, range(1 + 70 * row, 70 * (row + 1))) for row, text in enumerate(texts)
    ]
    got = sampled(runner, 1, added, [3, 1, 0, 2], [0] * 4, [lengths[r] for r in (3, 1, 0, 2)])
    assert got == [expected_tokens(texts[r], 1, GREEDY, 1000)[0] for r in (3, 1, 0, 2)]

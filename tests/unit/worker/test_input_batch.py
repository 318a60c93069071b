"""Inputs of a step against the same thing written as loops."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from tests.support.runner_rig import GREEDY, column
from worker_service.domain.capability import Limits
from worker_service.domain.plan import (
    AddedSequence,
    OutputKind,
    ScheduledRows,
    StepPlan,
    WeightVersion,
)
from worker_service.runner.input_batch import prepare
from worker_service.runner.logit_batch import LogitKind
from worker_service.runner.request_state import RequestState

LIMITS = Limits(8, 512, 60, 60)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from([1, 3, 4, 16]))
def test_equals_loops(data: st.DataObject, block_size: int) -> None:
    rows = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    state = RequestState(LIMITS, block_count=600, block_size=block_size, vocabulary_size=1000)
    blocks = iter(data.draw(st.permutations(range(1, 600))))
    added, starts, counts = [], [], []
    for row in rows:
        length = data.draw(st.integers(1, 60))
        start = data.draw(st.integers(0, length - 1))
        tokens = data.draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        table = [next(blocks) for _ in range(-(-length // block_size))]
        output = data.draw(st.sampled_from(OutputKind))
        added.append(AddedSequence(row, column(tokens), 1, GREEDY, output, column(table), start))
        starts.append(start)
        counts.append(data.draw(st.integers(1, length - start)))
    zeros = column(0 for _ in rows)
    plan = StepPlan(
        1,
        1,
        WeightVersion(1, ""),
        column([]),
        tuple(added),
        ScheduledRows(
            column(rows), column(starts), column(counts), zeros, zeros, column([]), zeros
        ),
        bytes,
    )
    state.apply(plan)
    batch, interest = prepare(plan, state)

    token_ids, positions, slots, ends, logit_indices, sampled = [], [], [], [0], [], []
    for sequence, start, count in zip(added, starts, counts, strict=True):
        for position in range(start, start + count):
            token_ids.append(int(sequence.token_ids[position]))
            positions.append(position)
            block = int(sequence.block_ids[position // block_size])
            slots.append(block * block_size + position % block_size)
        ends.append(ends[-1] + count)
        if start + count == sequence.token_ids.size and sequence.output is not OutputKind.NONE:
            logit_indices.append(ends[-1] - 1)
            kind = LogitKind[sequence.output.name]
            sampled.append((sequence.row, start + count, kind))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.query_starts.tolist() == ends
    assert batch.query_lengths.tolist() == counts
    contexts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert batch.context_lengths.tolist() == contexts
    assert interest.token_indices.tolist() == logit_indices
    columns = (interest.rows, interest.positions, interest.kinds)
    assert list(zip(*(each.tolist() for each in columns), strict=True)) == sampled
    assert batch.token_count == len(token_ids)
    width = -(-max(contexts) // block_size)
    assert batch.block_tables.shape == (len(rows), width)
    for index, sequence in enumerate(added):
        table = sequence.block_ids.tolist()[:width]
        assert batch.block_tables[index].tolist() == table + [0] * (width - len(table))

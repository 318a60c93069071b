"""A worker that holds the core to the step contract, sentence by sentence.

Its KV slots hold, instead of numbers, the whole prefix and cache salt they were computed from, so a
block that is shared, freed or reused wrongly is read as what it is: another sequence's.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

from control_plane.core.config import SchedulerConfig
from control_plane.core.plan import (
    AddedSequence,
    Row,
    RowFault,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from control_plane.core.tokens import Tokens

VOCABULARY = 7
END = 6
WEIGHTS = WeightVersion(1, "w")

Content = tuple[str, tuple[int, ...]]


def next_token(seed: int, tokens: list[int]) -> int:
    return zlib.crc32(bytes([seed % 251, *tokens])) % VOCABULARY


@dataclass
class WorkerRow:
    tokens: list[int]
    computed: int
    blocks: list[int]
    seed: int
    sampled_step: int = 0
    sampled_token: int = -1


class CheckingWorker:
    """Executes plans in order and asserts every sentence of the contract that it can."""

    def __init__(self, config: SchedulerConfig, epoch: int, salts: dict[int, str]) -> None:
        self.config = config
        self.epoch = epoch
        self.salts = salts
        self.step_id = 0
        self.rows: dict[int, WorkerRow] = {}
        self.slots: dict[tuple[int, int], Content] = {}

    def execute(self, plan: StepPlan, faulty: int | None) -> StepResult:
        """`faulty` is the index of the sampled row that fails, if there is one of that index."""
        assert (plan.epoch, plan.step_id) == (self.epoch, self.step_id + 1)
        assert plan.weight_version == WEIGHTS
        self.step_id = plan.step_id
        for removed in plan.removed_rows:
            del self.rows[removed]
        for sequence in plan.added:
            self._add(sequence)
        sampled = self._run(plan)
        faults = [
            RowFault(row, "INVALID_LOGITS", "injected")
            for index, row in enumerate(sampled)
            if index == faulty
        ]
        good = [row for row in sampled if row not in {fault.row for fault in faults}]
        tokens = [self.rows[row].sampled_token for row in good]
        return StepResult(
            plan.epoch, plan.step_id, good, [1] * len(good), Tokens(tokens), faults=faults
        )

    def _add(self, sequence: AddedSequence) -> None:
        assert 0 <= sequence.row < self.config.max_sequence_count
        assert sequence.row not in self.rows, "added to a row that is taken"
        assert 0 <= sequence.computed_token_count < len(sequence.token_ids)
        assert sequence.computed_token_count == len(sequence.block_ids) * self.config.block_size
        assert len(sequence.token_ids) < self.config.max_sequence_token_count
        self.rows[sequence.row] = WorkerRow(
            list(sequence.token_ids),
            sequence.computed_token_count,
            list(sequence.block_ids),
            sequence.seed,
        )

    def _run(self, plan: StepPlan) -> list[Row]:
        columns = plan.scheduled
        assert {sequence.row for sequence in plan.added} <= set(columns.rows)
        assert len(set(columns.rows)) == len(columns.rows)
        assert sum(columns.token_counts) <= self.config.max_step_token_count
        self._append(plan, columns)
        starts = zip(columns.rows, columns.start_positions, columns.token_counts, strict=True)
        spans = [(self.rows[row], start, start + count) for row, start, count in starts]
        for row, start, _ in spans:  # what earlier plans wrote, before this one writes anything
            self._read(row, 0, start)
        for row, start, end in spans:
            self._write(row, start, end)
        for row, start, end in spans:
            self._read(row, start, end)
            row.computed = end
        sampled = []
        for number, (row, _, end) in zip(columns.rows, spans, strict=True):
            if end == len(row.tokens):
                row.sampled_step = plan.step_id
                row.sampled_token = next_token(row.seed, row.tokens)
                sampled.append(number)
        return sampled

    def _append(self, plan: StepPlan, columns: ScheduledRows) -> None:
        literals, blocks = deque(columns.literal_tokens), deque(columns.appended_blocks)
        for number, start, count, distance, literal_count, block_count in zip(
            columns.rows,
            columns.start_positions,
            columns.token_counts,
            columns.source_step_distances,
            columns.literal_token_counts,
            columns.appended_block_counts,
            strict=True,
        ):
            row = self.rows[number]
            assert start == row.computed and count >= 1
            row.blocks += [blocks.popleft() for _ in range(block_count)]
            assert len(set(row.blocks)) == len(row.blocks)
            assert all(0 < block < self.config.block_count for block in row.blocks)
            if distance:
                assert literal_count == 0
                assert row.sampled_step == plan.step_id - distance > 0
                row.tokens.append(row.sampled_token)
            if literal_count:
                assert literal_count == count and start == len(row.tokens)
                row.tokens += [literals.popleft() for _ in range(literal_count)]
            end = start + count
            assert end <= len(row.tokens) < self.config.max_sequence_token_count
            assert not (distance or literal_count) or end == len(row.tokens)
            spare = len(row.blocks) * self.config.block_size - end
            assert 0 <= spare < self.config.block_size, "too few blocks, or more than it needs"
        assert not literals and not blocks

    def _write(self, row: WorkerRow, start: int, end: int) -> None:
        size = self.config.block_size
        for block in {row.blocks[position // size] for position in range(start, end)}:
            holders = [other for other in self.rows.values() if block in other.blocks]
            assert holders == [row], "writes into a block that another row holds"
        for position in range(start, end):
            content = (self.salts[row.seed], tuple(row.tokens[: position + 1]))
            self.slots[row.blocks[position // size], position % size] = content

    def _read(self, row: WorkerRow, start: int, end: int) -> None:
        size = self.config.block_size
        for position in range(start, end):
            content = self.slots.get((row.blocks[position // size], position % size))
            assert content == (self.salts[row.seed], tuple(row.tokens[: position + 1]))

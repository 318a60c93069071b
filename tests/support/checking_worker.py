"""A worker that holds the core to the step contract, sentence by sentence.

Its KV slots hold, instead of numbers, the whole prefix and cache salt they were computed from, so a
block that is shared, freed or reused wrongly is read as what it is: another sequence's. Its drafter
is right as often as it is wrong, and its verification keeps exactly what it would have sampled.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from control_plane.core.config import SchedulerConfig
from control_plane.core.plan import (
    AddedSequence,
    Message,
    Row,
    RowFault,
    SamplePlan,
    StepPlan,
    StepResult,
    WeightVersion,
)
from control_plane.core.request import OutputKind
from control_plane.core.tokens import Tokens

VOCABULARY = 7
END = 6
WEIGHTS = WeightVersion(1, "w")
MASK_BYTES = 4

Content = tuple[str, tuple[int, ...]]


def next_token(seed: int, tokens: list[int]) -> int:
    return zlib.crc32(bytes([seed % 251, *tokens])) % VOCABULARY


def next_allowed(seed: int, tokens: list[int], mask: bytes | None) -> int:
    """The next token, or the first behind it that the mask allows."""
    token = next_token(seed, tokens)
    if mask is None:
        return token
    allowed = int.from_bytes(mask, "little")
    candidates = [*range(token, VOCABULARY), *range(token)]
    return next(candidate for candidate in candidates if allowed >> candidate & 1)


def mask_of(seed: int, tokens: list[int]) -> bytes | None:
    """What a made-up grammar allows after these tokens: often anything, never nothing."""
    allowed = zlib.crc32(b"mask" + bytes([seed % 251, *tokens])) % (2 << VOCABULARY)
    allowed %= 1 << VOCABULARY
    return allowed.to_bytes(MASK_BYTES, "little") if allowed % 4 else None


def drafts_of(seed: int, tokens: list[int], count: int) -> list[int]:
    """What the drafter proposes behind these tokens."""
    drafts: list[int] = []
    for _ in range(count):
        token = next_token(seed, tokens + drafts)
        is_right = zlib.crc32(b"draft" + bytes([seed % 251, *tokens, *drafts])) % 2
        drafts.append(token if is_right else (token + 1) % VOCABULARY)
    return drafts


@dataclass
class WorkerRow:
    """What the worker holds of a sequence. `accepted` counts drafts by the step they were in."""

    tokens: list[int]
    computed: int
    blocks: list[int]
    seed: int
    output: OutputKind
    sampled_step: int = 0
    sampled_token: int = -1
    held_step: int = 0
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Delta:
    """One scheduled row of a plan, by its columns."""

    number: Row
    start: int
    count: int
    distance: int
    literals: list[int]
    blocks: list[int]
    draft_count: int
    open_distance: int


def deltas(plan: StepPlan) -> Iterator[Delta]:
    """The scheduled rows of a plan; asserts that its columns fit together."""
    columns = plan.scheduled
    none = [0] * len(columns.rows)
    literals, blocks = iter(columns.literal_tokens), iter(columns.appended_blocks)
    assert not columns.literal_draft_counts and not columns.literal_drafts
    for number, start, count, distance, literal_count, block_count, drafts, opened in zip(
        columns.rows,
        columns.start_positions,
        columns.token_counts,
        columns.source_step_distances,
        columns.literal_token_counts,
        columns.appended_block_counts,
        columns.draft_counts or none,
        columns.open_step_distances or none,
        strict=True,
    ):
        own_literals = [next(literals) for _ in range(literal_count)]
        own_blocks: list[int] = [next(blocks) for _ in range(block_count)]
        yield Delta(number, start, count, distance, own_literals, own_blocks, drafts, opened)
    assert not list(literals) and not list(blocks)


class CheckingWorker:
    """Executes messages in order and asserts every sentence of the contract that it can."""

    def __init__(self, config: SchedulerConfig, epoch: int, salts: dict[int, str]) -> None:
        self.config = config
        self.salts = salts
        self.slots: dict[tuple[int, int], Content] = {}
        self.attach(epoch)

    def attach(self, epoch: int) -> None:
        """Another claim: the rows go, the KV stays where it is."""
        self.epoch = epoch
        self.step_id = 0
        self.rows: dict[int, WorkerRow] = {}

    def execute(self, message: Message, faulty: int | None) -> StepResult:
        """`faulty` is the index of the row that fails, of those that get tokens."""
        if isinstance(message, SamplePlan):
            return self._sample(message, faulty)
        return self._step(message, faulty)

    def _step(self, plan: StepPlan, faulty: int | None) -> StepResult:
        assert (plan.epoch, plan.step_id) == (self.epoch, self.step_id + 1)
        assert plan.weight_version == WEIGHTS
        self.step_id = plan.step_id
        for removed in plan.removed_rows:
            del self.rows[removed]
        for sequence in plan.added:
            self._add(sequence)
        tokens = self._run(plan)
        faulted = list(tokens)[faulty : faulty + 1] if faulty is not None else []
        for number in faulted:
            del tokens[number]
        rows = plan.scheduled.rows
        held = [number for number in rows if self.rows[number].held_step == plan.step_id]
        return result_of(plan, tokens, held, faulted)

    def _sample(self, plan: SamplePlan, faulty: int | None) -> StepResult:
        assert plan.epoch == self.epoch and 0 < plan.step_id <= self.step_id and plan.rows
        masks: dict[Row, bytes] = {}
        if plan.masks is not None:
            assert plan.masks.rows and set(plan.masks.rows) <= set(plan.rows)
            assert len(plan.masks.bitmasks) == MASK_BYTES * len(plan.masks.rows)
            for index, number in enumerate(plan.masks.rows):
                masks[number] = plan.masks.bitmasks[MASK_BYTES * index : MASK_BYTES * (index + 1)]
        faulted = plan.rows[faulty : faulty + 1] if faulty is not None else []
        tokens: dict[Row, list[int]] = {}
        for number in plan.rows:
            row = self.rows[number]
            assert row.held_step == plan.step_id, "samples a row that the step does not hold"
            row.held_step = 0
            row.sampled_step = plan.step_id
            row.sampled_token = next_allowed(row.seed, row.tokens, masks.get(number))
            tokens[number] = [row.sampled_token]
        for number in faulted:
            del tokens[number]
        return result_of(plan, tokens, [], faulted)

    def _add(self, sequence: AddedSequence) -> None:
        assert 0 <= sequence.row < self.config.max_sequence_count
        assert sequence.row not in self.rows, "added to a row that is taken"
        assert 0 < sequence.prompt_token_count <= len(sequence.token_ids)
        assert 0 <= sequence.computed_token_count < len(sequence.token_ids)
        assert sequence.computed_token_count == len(sequence.block_ids) * self.config.block_size
        assert len(sequence.token_ids) < self.config.max_sequence_token_count
        self.rows[sequence.row] = WorkerRow(
            list(sequence.token_ids),
            sequence.computed_token_count,
            list(sequence.block_ids),
            sequence.seed,
            sequence.output,
        )

    def _run(self, plan: StepPlan) -> dict[Row, list[int]]:
        """The tokens of each row that reached its end and is not held."""
        columns = plan.scheduled
        assert {sequence.row for sequence in plan.added} <= set(columns.rows)
        assert len(set(columns.rows)) == len(columns.rows)
        assert sum(columns.token_counts) <= self.config.max_step_token_count
        scheduled = [(delta, *self._take(plan.step_id, delta)) for delta in deltas(plan)]
        for _, row, start in scheduled:  # what earlier plans wrote, before this one writes anything
            self._read(row, 0, start)
        for delta, row, start in scheduled:
            self._write(row, start, start + delta.count)
        for delta, row, start in scheduled:
            self._read(row, start, start + delta.count)
        tokens: dict[Row, list[int]] = {}
        for delta, row, start in scheduled:
            row.computed = start + delta.count
            if row.computed < len(row.tokens):
                continue
            if row.output is OutputKind.HOLD:
                row.held_step = plan.step_id
            else:
                tokens[delta.number] = self._verify(plan.step_id, row, delta.draft_count)
        return tokens

    def _take(self, step_id: int, delta: Delta) -> tuple[WorkerRow, int]:
        """Gives a row its new tokens, drafts and blocks; returns it and where it really starts."""
        row, start = self.rows[delta.number], delta.start
        assert not row.held_step, "goes on while it is held"
        if delta.open_distance:
            first = step_id - delta.open_distance
            assert first > 0
            start += sum(count for step, count in row.accepted.items() if step >= first)
        assert start == row.computed and 0 <= delta.draft_count < delta.count
        assert delta.draft_count <= self.config.max_draft_token_count
        row.blocks += delta.blocks
        assert len(set(row.blocks)) == len(row.blocks)
        assert all(0 < block < self.config.block_count for block in row.blocks)
        sure_count = delta.count - delta.draft_count
        if delta.distance:
            assert not delta.literals and sure_count == 1
            assert row.sampled_step == step_id - delta.distance > 0
            row.tokens.append(row.sampled_token)
        if delta.literals:
            assert len(delta.literals) == sure_count and start == len(row.tokens)
            row.tokens += delta.literals
        assert start + sure_count <= len(row.tokens)
        if delta.distance or delta.literals or delta.draft_count:
            assert start + sure_count == len(row.tokens), "new tokens that are not the last"
        row.tokens += drafts_of(row.seed, row.tokens, delta.draft_count)
        end = start + delta.count
        assert end < self.config.max_sequence_token_count
        spare = len(row.blocks) * self.config.block_size - end
        drafts = self.config.max_draft_token_count * self.config.max_inflight_step_count
        assert 0 <= spare < self.config.block_size + drafts, "too few blocks, or more than needed"
        return row, start

    def _verify(self, step_id: int, row: WorkerRow, draft_count: int) -> list[int]:
        """Samples behind the last token that is sure, and behind each draft that is accepted.

        Leaves the row at the end of what was accepted.
        """
        sure = len(row.tokens) - draft_count
        drafts, row.tokens = deque(row.tokens[sure:]), row.tokens[:sure]
        sampled = [next_token(row.seed, row.tokens)]
        while drafts and drafts[0] == sampled[-1]:
            row.tokens.append(drafts.popleft())
            sampled.append(next_token(row.seed, row.tokens))
        row.computed = len(row.tokens)
        row.accepted[step_id] = len(sampled) - 1
        row.sampled_step, row.sampled_token = step_id, sampled[-1]
        return sampled

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


def result_of(
    message: Message, tokens: dict[Row, list[int]], held: list[Row], faulted: list[Row]
) -> StepResult:
    """The answer to a message: tokens by row, rows that are held, and rows that failed."""
    return StepResult(
        message.epoch,
        message.step_id,
        list(tokens),
        [len(ids) for ids in tokens.values()],
        Tokens([token for ids in tokens.values() for token in ids]),
        held,
        [RowFault(row, "INVALID_LOGITS", "injected") for row in faulted],
    )

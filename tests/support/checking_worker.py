"""A worker that holds the core to the step contract, sentence by sentence.

Its KV slots hold, instead of numbers, the whole prefix and cache salt they were computed from, so a
block that is shared, freed or reused wrongly is read as what it is: another sequence's. Its drafter
is right as often as it is wrong, and its verification keeps exactly what it would have sampled.
"""

from __future__ import annotations

import zlib

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
from tests.support.plan_interpreter import Delta, PlanInterpreter, Run, WorkerRow

VOCABULARY = 7
END = 6
WEIGHTS = WeightVersion(1, "w")
MASK_BYTES = 4

Content = tuple[str, str, tuple[int, ...]]
"""Cache salt, weights, and the tokens up to there."""
MIXED = "mixed"
"""In place of weights: computed over KV of other ones."""


def made_with(weights: str, adapter: str) -> str:
    """What tokens depend on, as one digest."""
    return f"{weights}+{adapter}" if adapter else weights


def next_token(seed: int, tokens: list[int], digest: str = WEIGHTS.digest) -> int:
    own = b"" if digest == WEIGHTS.digest else digest.encode()
    return zlib.crc32(own + bytes([seed % 251, *tokens])) % VOCABULARY


def next_allowed(
    seed: int, tokens: list[int], mask: bytes | None, digest: str = WEIGHTS.digest
) -> int:
    """The next token, or the first behind it that the mask allows."""
    token = next_token(seed, tokens, digest)
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


def drafts_of(seed: int, tokens: list[int], count: int, digest: str) -> list[int]:
    """What the drafter proposes behind these tokens."""
    drafts: list[int] = []
    for _ in range(count):
        token = next_token(seed, tokens + drafts, digest)
        is_right = zlib.crc32(b"draft" + bytes([seed % 251, *tokens, *drafts])) % 2
        drafts.append(token if is_right else (token + 1) % VOCABULARY)
    return drafts


class CheckingWorker:
    """Executes messages in order and asserts every sentence of the contract that it can."""

    def __init__(self, config: SchedulerConfig, epoch: int, salts: dict[int, str]) -> None:
        self.config = config
        self.salts = salts
        self.slots: dict[tuple[int, int], Content] = {}
        self.weights = WEIGHTS
        self.kept: set[WorkerRow] = set()
        """Rows that may read what other weights have written."""
        self.adapters: dict[int, str] = {}
        """Digests, by slot."""
        self.attach(epoch)

    def attach(self, epoch: int) -> None:
        """Another claim: the rows go, the KV stays where it is."""
        self.epoch = epoch
        self.step_id = 0
        self._plans = PlanInterpreter(self.config.block_size, self._propose)
        self.kept.clear()

    def commit(self, weights: WeightVersion, *, keep_kv: bool) -> None:
        """Other weights. Rows and KV stay where they are."""
        self.weights = weights
        self.kept = set(self.rows.values()) if keep_kv else set()

    def load_adapter(self, slot: int, digest: str) -> None:
        """Puts an adapter in place of what the slot held."""
        assert 1 <= slot <= self.config.adapter_slot_count
        users = [row for row in self.rows.values() if row.adapter_slot == slot]
        assert not users, "the slot of a row is given away"
        self.adapters[slot] = digest

    def _made_with(self, row: WorkerRow) -> str:
        """The digests of weights and adapter."""
        adapter = self.adapters[row.adapter_slot] if row.adapter_slot else ""
        return made_with(self.weights.digest, adapter)

    def _propose(self, row: WorkerRow, count: int) -> list[int]:
        return drafts_of(row.seed, row.tokens, count, self._made_with(row))

    def _token_after(self, row: WorkerRow) -> int:
        return next_token(row.seed, row.tokens, self._made_with(row))

    @property
    def rows(self) -> dict[Row, WorkerRow]:
        return self._plans.rows

    def execute(self, message: Message, faulty: int | None) -> StepResult:
        """`faulty` is the index of the row that fails, of those that get tokens."""
        if isinstance(message, SamplePlan):
            return self._sample(message, faulty)
        return self._step(message, faulty)

    def _step(self, plan: StepPlan, faulty: int | None) -> StepResult:
        assert (plan.epoch, plan.step_id) == (self.epoch, self.step_id + 1)
        assert plan.weight_version == self.weights
        self.step_id = plan.step_id
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
            token = next_allowed(row.seed, row.tokens, masks.get(number), self._made_with(row))
            self._plans.sample_held(plan.step_id, number, token)
            tokens[number] = [token]
        for number in faulted:
            del tokens[number]
        return result_of(plan, tokens, [], faulted)

    def _run(self, plan: StepPlan) -> dict[Row, list[int]]:
        """The tokens of each row that reached its end and is not held."""
        columns, config = plan.scheduled, self.config
        for sequence in plan.added:
            self._check_added(sequence)
        assert {sequence.row for sequence in plan.added} <= set(columns.rows)
        assert sum(columns.token_counts) <= config.max_step_token_count
        assert not columns.literal_draft_counts and not columns.literal_drafts
        runs = self._plans.apply(plan, self._check_delta)
        for run in runs:
            self._check_run(run)
        for run in runs:  # what earlier plans wrote, before this one writes anything
            self._read(run.row, 0, run.start)
        for run in runs:
            self._write(run.row, run.start, run.end)
        for run in runs:
            self._read(run.row, run.start, run.end)
        tokens: dict[Row, list[int]] = {}
        for run in runs:
            self._plans.computed(run)
            if not run.reaches_end:
                continue
            if run.row.output is OutputKind.HOLD:
                self._plans.hold(plan.step_id, run)
            else:
                tokens[run.delta.number] = self._plans.sample(plan.step_id, run, self._token_after)
        return tokens

    def _check_added(self, sequence: AddedSequence) -> None:
        assert 0 <= sequence.row < self.config.max_sequence_count
        assert sequence.computed_token_count == len(sequence.block_ids) * self.config.block_size
        assert len(sequence.token_ids) < self.config.max_sequence_token_count
        assert self.adapters.get(sequence.adapter_slot, "") == sequence.adapter_digest

    def _check_delta(self, delta: Delta, row: WorkerRow, start: int) -> None:
        """What this core never asks for, though a worker would do it."""
        assert not row.held_step, "goes on while it is held"
        assert delta.draft_count <= self.config.max_draft_token_count
        if delta.distance:
            assert delta.sure_count == 1
        if delta.literals:
            assert start == len(row.tokens), "literal tokens in place of known ones"

    def _check_run(self, run: Run) -> None:
        row, config = run.row, self.config
        assert len(set(row.blocks)) == len(row.blocks)
        assert all(0 < block < config.block_count for block in row.blocks)
        assert run.end < config.max_sequence_token_count
        spare = len(row.blocks) * config.block_size - run.end
        drafts = config.max_draft_token_count * config.max_inflight_step_count
        assert 0 <= spare < config.block_size + drafts, "too few blocks, or more than needed"

    def _salt(self, row: WorkerRow) -> str:
        """What keeps the KV of others apart: the cache's salt, and the adapter."""
        adapter = self.adapters[row.adapter_slot] if row.adapter_slot else ""
        return made_with(self.salts[row.seed], adapter)

    def _write(self, row: WorkerRow, start: int, end: int) -> None:
        size = self.config.block_size
        for block in {row.blocks[position // size] for position in range(start, end)}:
            holders = [other for other in self.rows.values() if block in other.blocks]
            assert holders == [row], "writes into a block that another row holds"
        for position in range(start, end):
            weights = MIXED if row in self.kept else self.weights.digest
            content = (self._salt(row), weights, tuple(row.tokens[: position + 1]))
            self.slots[row.blocks[position // size], position % size] = content

    def _read(self, row: WorkerRow, start: int, end: int) -> None:
        size = self.config.block_size
        for position in range(start, end):
            content = self.slots.get((row.blocks[position // size], position % size))
            assert content is not None
            salt, weights, tokens = content
            assert (salt, tokens) == (self._salt(row), tuple(row.tokens[: position + 1]))
            assert weights == self.weights.digest or row in self.kept, "KV of other weights"


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

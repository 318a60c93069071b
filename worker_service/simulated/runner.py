"""A runner without a model or torch: deterministic tokens behind a latency model.

It keeps the real runner's contract through the same RequestState and input preparation, and a KV
pool of one 64-bit number per slot. A sampled token depends on every number its block table leads to
and on their order, so a mistake in either plane's block accounting changes tokens, as it would with
a model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import (
    Capability,
    DataType,
    Device,
    DeviceKind,
    Feature,
    LayerGroup,
    Limits,
    MemoryPool,
    Model,
    RankCoordinates,
)
from worker_service.domain.columns import NULL_BLOCK, IntColumn
from worker_service.domain.errors import PlanMismatch
from worker_service.domain.plan import (
    RowFault,
    RowFaultKind,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import SleepTag, TensorDescription, WeightsUpdate
from worker_service.parallel.digest import digest_of
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.drafts import kept_tokens
from worker_service.runner.input_batch import prepare
from worker_service.runner.interface import CompletedStep, PendingStep, Preparation, Prepared
from worker_service.runner.logit_batch import LogitBatch, LogitKind
from worker_service.runner.request_state import RequestState
from worker_service.sampling.masks import find_masks
from worker_service.sampling.state import SamplingState
from worker_service.simulated.arithmetic import (
    Words,
    adapter_word,
    choose,
    mix,
    position_weights,
    preferences,
)
from worker_service.simulated.drafter import propose
from worker_service.simulated.weights import SimulatedPrepared, SimulatedWeights

_BYTES_PER_SLOT = 8
_NONE: IntColumn = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SimulatedLatency:
    """Seconds a step takes: `step`, plus each token, row and thousand attended tokens.

    The defaults are near an 8B model in bfloat16 on one H200: 3.6 ms for one sequence, 18 ms for
    256 with 1k tokens each, 36k prompt tokens per second.
    """

    step: float = 3.5e-3
    token: float = 27e-6
    row: float = 0.0
    kilotoken: float = 30e-6

    def of(self, batch: StepBatch) -> float:
        """Seconds for one step of these inputs."""
        attended = int(batch.context_lengths.sum(dtype=np.int64))
        return (
            self.step
            + self.token * batch.token_count
            + self.row * batch.context_lengths.size
            + self.kilotoken * attended / 1000
        )


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """What is pretended. `block_count` includes the null block. No token below `first_token` is
    ever sampled, unless a mask leaves no other. Each of several ranks computes everything by
    itself, so they need no group; only one of them answers with tokens. `rendezvous_address` is
    where they would meet; `weights_root` is the folder that updates may read. An adapter's digest
    goes into everything that its rows write to the KV."""

    name: str
    vocabulary_size: int
    limits: Limits
    block_count: int
    block_size: int = 16
    architecture: str = "Simulated"
    random_seed: int = 0
    first_token: int = 0
    ranks: RankCoordinates = field(default_factory=RankCoordinates)
    rendezvous_address: str = ""
    adapter_limits: AdapterLimits = field(default_factory=AdapterLimits)
    weights_root: Path | None = None


def simulated_pool_bytes(block_count: int, block_size: int) -> int:
    """What the pool's numbers take of the host."""
    return block_count * block_size * _BYTES_PER_SLOT


class SimulatedRunner:
    """runner.interface.Runner. `sleep` and `clock` are in seconds."""

    def __init__(
        self,
        model: SimulatedModel,
        latency: SimulatedLatency,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._latency = latency
        self._sleep = sleep
        self._clock = clock
        self.adapters = AdapterSlots(model.adapter_limits)
        self._state = RequestState(
            model.limits,
            model.block_count,
            model.block_size,
            model.vocabulary_size,
            self.adapters,
        )
        self._sampling = SamplingState(model.limits.max_sequence_count)
        # No plan may write to the null block, so it stays zero and padding adds nothing.
        self._kv: Words = np.zeros((model.block_count, model.block_size), dtype=np.uint64)
        # A held row's stand-in for logits.
        self._held: dict[int, np.uint64] = {}
        content = f"twinplane simulated model, vocabulary {model.vocabulary_size}"
        if model.first_token:
            content += f", first token {model.first_token}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        self._weights = SimulatedWeights(digest, model.weights_root)
        self._asleep: frozenset[SleepTag] = frozenset()

    def capability(self) -> Capability:
        model = self._model
        return Capability(
            device=Device(DeviceKind.SIMULATED, "simulated"),
            model=Model(model.name, model.architecture, model.vocabulary_size, DataType.FLOAT32),
            weight_version=self._weights.version,
            limits=model.limits,
            features=frozenset(Feature),
            executor="simulated",
            attention_backend="simulated",
            arithmetic="simulated",
            random_seed=model.random_seed,
            ranks=model.ranks,
            rendezvous_address=model.rendezvous_address,
            adapter_slot_count=model.adapter_limits.slot_count,
            max_adapter_rank=model.adapter_limits.max_rank,
        )

    def memory_pool(self) -> MemoryPool:
        model = self._model
        return MemoryPool(
            block_count=model.block_count,
            block_token_count=model.block_size,
            bytes_per_block=model.block_size * _BYTES_PER_SLOT,
            layer_groups=(LayerGroup((0,), 1, 1, DataType.FLOAT32),),
            used_block_count=self._state.used_block_count(),
            weights_bytes=0,
            kv_bytes=0 if SleepTag.KV in self._asleep else self._kv.nbytes,
            workspace_bytes=0,
            free_bytes=0,
        )

    def reset(self) -> None:
        self._state.reset()
        self._held.clear()

    def begin_update(self, update: WeightsUpdate, is_cancelled: Callable[[], bool]) -> Preparation:
        return self._weights.begin(update, is_cancelled)

    def commit_update(self, prepared: Prepared) -> WeightVersion:
        assert isinstance(prepared, SimulatedPrepared), "prepared by another runner"
        return self._weights.commit(prepared)

    def tensors(self) -> tuple[TensorDescription, ...]:
        return tuple(each for _, each in sorted(self._weights.tensors.items()))

    def sleep(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        if SleepTag.KV in tags and self._state.active.any():
            raise PlanMismatch("rows of the persistent batch need their KV: remove them first")
        if SleepTag.KV in tags:
            self._kv[:] = 0  # what was in it is lost
        self._asleep |= tags
        return self._asleep

    def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        self._asleep -= tags
        return self._asleep

    def join(self, rendezvous: Rendezvous) -> None:
        """Meets nobody: see SimulatedModel."""

    def abandon(self, before_epoch: int) -> None:
        """Waits for nobody: see SimulatedModel."""

    def launch(self, plan: StepPlan) -> PendingStep:
        started, state, scheduled = self._clock(), self._state, plan.scheduled
        self._sampling.check(plan)
        state.apply(plan)
        for sequence in plan.added:
            self._sampling.add(sequence)
        for row in (*plan.removed_rows.tolist(), *scheduled.rows.tolist()):
            self._held.pop(row, None)
        if not scheduled.rows.size:
            return CompletedStep(self._told(StepResult(plan.epoch, plan.step_id)))
        if scheduled.draft_counts.any():
            self._draft(scheduled)
        batch, interest = prepare(plan, state)
        written = mix(batch.token_ids, batch.positions, self._weights.salt)
        if batch.adapter_slots is not None:
            digests = [self.adapters.digest(slot) for slot in batch.adapter_slots.tolist()]
            words = np.array([adapter_word(each) for each in digests], dtype=np.uint64)
            written ^= np.repeat(words, batch.query_lengths)
        self._kv.reshape(-1)[batch.slots] = written
        state.advance(scheduled)
        preferred, held = self._preferences(batch, interest), interest.are(LogitKind.HOLD)
        for row, preference in zip(interest.rows[held].tolist(), preferred[held], strict=True):
            self._held[row] = preference
        state.record_held(interest.rows[held], plan.step_id)
        result = self._sample(plan, batch, interest.take(~held), preferred[~held])
        remaining = started + self._latency.of(batch) - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        result = replace(result, held_rows=interest.rows[held])
        counts = batch.query_lengths
        return CompletedStep(self._told(result, scheduled.rows, counts, batch.positions))

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        rows, vocabulary = plan.rows, self._model.vocabulary_size
        self._state.require_held(rows, plan.step_id)
        positions = self._state.known_counts[rows]
        masks = None if plan.masks is None else find_masks(plan.masks, rows, vocabulary)
        held = [self._held.pop(row) for row in rows.tolist()]
        tokens = self._choose(np.array(held, dtype=np.uint64))
        empty = np.zeros(rows.size, dtype=bool)
        if masks is not None:
            allowed_tokens = masks.allowed(vocabulary)
            for index, allowed in zip(masks.indices.tolist(), allowed_tokens, strict=True):
                choices = np.flatnonzero(allowed)
                empty[index] = not choices.size
                if choices.size:  # the first from the free token on, around the end
                    place = int(np.searchsorted(choices, tokens[index]))
                    tokens[index] = choices[place % choices.size]
        self._state.record_sampled(rows[~empty], tokens[~empty], plan.step_id)
        self._state.record_faults(rows[empty], plan.step_id)
        faults = tuple(
            RowFault(row, RowFaultKind.EMPTY_MASK, "no token is allowed")
            for row in rows[empty].tolist()
        )
        ones = np.ones_like(rows[~empty])
        result = StepResult(
            plan.epoch, plan.step_id, rows[~empty], ones, tokens[~empty], faults=faults
        )
        return CompletedStep(self._told(result, rows, np.ones_like(rows), positions))

    def _told(
        self,
        result: StepResult,
        rows: IntColumn = _NONE,
        token_counts: IntColumn = _NONE,
        positions: IntColumn = _NONE,
    ) -> StepResult:
        """What this rank says of a step: see StepResult."""
        ranks = self._model.ranks
        if ranks.size == 1:
            return result
        epoch, step_id = result.epoch, result.step_id
        digest = digest_of(epoch, step_id, rows, token_counts, positions, result.tokens)
        if ranks.answers:
            return replace(result, digest=digest)
        return StepResult(epoch, step_id, digest=digest)

    def _draft(self, scheduled: ScheduledRows) -> None:
        """Proposes drafts for the rows that verify some and were given none."""
        given = scheduled.literal_draft_counts
        wanted = scheduled.draft_counts > 0
        if given.size:
            wanted &= given == 0
        rows, counts = scheduled.rows[wanted], scheduled.draft_counts[wanted]
        if not rows.size:
            return
        state, drafts = self._state, []
        seeds = self._seeds(rows)
        for row, count, seed in zip(rows.tolist(), counts.tolist(), seeds.tolist(), strict=True):
            tokens = state.token_ids[row, : state.known_counts[row]]
            drafts += propose(
                tokens,
                count,
                seed,
                self._model.vocabulary_size,
                self._model.first_token,
                self._weights.salt,
            )
        state.put_drafts(rows, counts, np.array(drafts, dtype=np.int32))

    def _sample(
        self, plan: StepPlan, batch: StepBatch, interest: LogitBatch, preferred: Words
    ) -> StepResult:
        """Takes a token for each position [L], and keeps those that verification leaves."""
        tokens, rows = self._choose(preferred), interest.rows
        counts = np.ones_like(rows)
        if plan.scheduled.draft_counts.any():
            kept, rows, counts = kept_tokens(batch, interest, tokens)
            tokens = tokens[kept]
            verifying = np.isin(rows, plan.scheduled.rows[plan.scheduled.draft_counts > 0])
            self._state.accept_drafts(rows[verifying], counts[verifying] - 1, plan.step_id)
        self._state.record_sampled(rows, tokens[np.cumsum(counts) - 1], plan.step_id)
        return StepResult(plan.epoch, plan.step_id, rows, counts, tokens)

    def _choose(self, preferred: Words) -> IntColumn:
        """int32 [n]: the tokens that preferences stand for."""
        return choose(preferred, self._model.vocabulary_size, self._model.first_token)

    def _seeds(self, rows: IntColumn) -> Words:
        """uint64 [n]: 0 for rows that are greedy."""
        own = self._sampling.parameters(rows)
        return np.where(own.temperature > 0, own.seed, np.uint64(0))

    def _preferences(self, batch: StepBatch, interest: LogitBatch) -> Words:
        """uint64 [L]: a hash of the KV before each position of interest, as its row's block table
        finds it."""
        if not interest.rows.size:
            return np.empty(0, dtype=np.uint64)
        size = self._model.block_size
        sequences = np.searchsorted(batch.query_starts, interest.token_indices, side="right") - 1
        tables = batch.block_tables[sequences]
        full, tail = np.divmod(interest.positions, size)
        block_indices = np.arange(tables.shape[1], dtype=np.int32)
        whole = np.where(block_indices < full[:, None], tables, NULL_BLOCK)
        weights = position_weights(np.arange(tables.shape[1] * size, dtype=np.uint64))
        kv = self._kv.take(whole, axis=0).reshape(len(whole), -1)
        sums = kv @ weights
        partial = np.flatnonzero(tail)
        if partial.size:  # the block that is filled only up to `tail`
            offsets = np.arange(size, dtype=np.int32)
            blocks = self._kv[tables[partial, full[partial]]]
            blocks = np.where(offsets < tail[partial, None], blocks, np.uint64(0))
            positions = full[partial, None].astype(np.uint64) * np.uint64(size) + offsets.astype(
                np.uint64
            )
            sums[partial] += (blocks * position_weights(positions)).sum(axis=1, dtype=np.uint64)
        seeds = self._seeds(interest.rows)
        return preferences(sums, seeds, interest.positions.astype(np.uint64))

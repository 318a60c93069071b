"""The real runner: a plan in, tokens out. It holds only what all models share.

It joins collaborators and has no policy of its own: RequestState keeps the rows, `prepare` makes a
step's inputs, the executor runs them, SamplingState knows how each row is sampled, the sampler
draws. Where the replica has several ranks, RankSteps says who does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import (
    RowFault,
    RowFaultKind,
    SamplePlan,
    StepPlan,
    StepResult,
)
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.sampling import SamplingColumns, SamplingParameters
from worker_service.parallel.peers import Peers
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.device import memory_of
from worker_service.runner.held_logits import HeldLogits
from worker_service.runner.input_batch import prepare
from worker_service.runner.interface import CompletedStep, PendingStep
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.logit_batch import BoolColumn, LogitBatch, LogitKind
from worker_service.runner.plan_checks import refuse_drafts
from worker_service.runner.rank_steps import Applied, RankSteps
from worker_service.runner.request_state import RequestState
from worker_service.runner.weight_changes import ChangesWeights
from worker_service.runner.weight_store import WeightStore
from worker_service.sampling.masks import MaskBatch, find_masks
from worker_service.sampling.sampler import sample
from worker_service.sampling.state import SamplingBatch, SamplingState

LogitsObserver = Callable[[int, LogitBatch, torch.Tensor], None]
"""Called with a step's id, its positions of interest and their logits [L, vocabulary], before
they are used. The tensor is the runner's: it may be copied, not kept."""


class ModelRunner(ChangesWeights):
    """interface.Runner on a device. One thread owns it; others may call only `capability`."""

    def __init__(
        self,
        capability: Capability,
        weights: WeightStore,
        cache: KVCache,
        device: torch.device,
        peers: Peers | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """`peers` are the other ranks of the replica, if there are any; `adapters` its slots."""
        self.adapters = AdapterSlots(AdapterLimits()) if adapters is None else adapters
        self._capability = capability
        self._weights = weights
        self._cache = cache
        self._vocabulary_size = capability.model.vocabulary_size
        self._device = device
        self._state = RequestState(
            capability.limits,
            cache.block_count,
            cache.block_size,
            self._vocabulary_size,
            self.adapters,
        )
        self._sampling = SamplingState(capability.limits.max_sequence_count)
        self._held = HeldLogits()
        self._observer: LogitsObserver | None = None
        self._ranks = None if peers is None else RankSteps(peers, self._state)

    def capability(self) -> Capability:
        return self._capability

    def memory_pool(self) -> MemoryPool:
        weights_bytes, workspace_bytes = self._weights.live_bytes
        return MemoryPool(
            block_count=self._cache.block_count,
            block_token_count=self._cache.block_size,
            bytes_per_block=self._cache.bytes_per_block,
            layer_groups=self._cache.layer_groups,
            used_block_count=self._state.used_block_count(),
            weights_bytes=weights_bytes,
            kv_bytes=self._cache.held_bytes,
            workspace_bytes=workspace_bytes,
            free_bytes=memory_of(self._device).free_bytes,
            adapters_bytes=self.adapters.byte_count,
            prepared_bytes=self._weights.prepared_bytes,
            kept_tensors_bytes=self._weights.kept_bytes,
        )

    def reset(self) -> None:
        self._state.reset()
        self._held.clear()
        if self._ranks is not None:
            self._ranks.reset()

    def join(self, rendezvous: Rendezvous) -> None:
        if self._ranks is not None:
            self._ranks.join(rendezvous)

    def abandon(self, before_epoch: int) -> None:
        if self._ranks is not None:
            self._ranks.abandon(before_epoch)

    def observe(self, observer: LogitsObserver | None) -> None:
        """From the next step on, shows every step's logits to `observer`. None ends that."""
        self._observer = observer

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        if self._ranks is None:
            return self._launch(plan)
        return self._ranks.guard(lambda: self._launch(plan))

    @torch.inference_mode()
    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        if self._ranks is None:
            return self._launch_sample(plan)
        return self._ranks.guard(lambda: self._launch_sample(plan))

    def _launch(self, plan: StepPlan) -> PendingStep:
        state, ranks, rows = self._state, self._ranks, plan.scheduled.rows
        refuse_drafts(plan.scheduled)
        self._sampling.check(plan)
        if ranks is not None:
            ranks.settle(plan.removed_rows, rows)
        state.apply(plan)
        for sequence in plan.added:
            self._sampling.add(sequence)
        self._held.drop(plan.removed_rows.tolist())
        self._held.drop(rows.tolist())
        self._weights.executor.take_blocks(plan)
        if not rows.size:
            nothing = StepResult(plan.epoch, plan.step_id)
            if ranks is not None:
                nothing = Applied.nothing(plan).result(rows)
            return CompletedStep(nothing)
        batch, interest = prepare(plan, state)
        logits = self._weights.executor.run(batch, interest.token_indices)
        state.advance(plan.scheduled)
        if self._observer is not None and logits.shape[0] == interest.rows.size:
            self._observer(plan.step_id, interest, logits)
        if ranks is None:
            return CompletedStep(self._conclude(plan, interest, logits))
        counts, held = batch.query_lengths, interest.are(LogitKind.HOLD)
        applied = Applied(plan.epoch, plan.step_id, rows, counts, batch.positions)
        if ranks.answers:
            result = self._conclude(plan, interest, logits)
            return CompletedStep(ranks.answer(result, applied, interest.rows[~held]))
        state.record_held(interest.rows[held], plan.step_id)
        return ranks.follow(applied, interest.rows[~held])

    def _launch_sample(self, plan: SamplePlan) -> PendingStep:
        state, ranks, rows = self._state, self._ranks, plan.rows
        if ranks is not None:
            ranks.settle(rows)
        state.require_held(rows, plan.step_id)
        masks = None if plan.masks is None else find_masks(plan.masks, rows, self._vocabulary_size)
        positions = state.known_counts[rows]
        applied = Applied(plan.epoch, plan.step_id, rows, np.ones_like(rows), positions)
        if ranks is not None and not ranks.answers:
            return ranks.follow(applied, rows)
        logits = self._held.take(rows)
        result = self._sample(plan.epoch, plan.step_id, rows, positions, logits, masks)
        return CompletedStep(result if ranks is None else ranks.answer(result, applied, rows))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs a decoding and an extending step over the null block, and the sampler.

        So the first request need not wait until kernels are made and buffers allocated.
        """
        limits = self._capability.limits
        rows = min(8, limits.max_sequence_count, limits.max_step_token_count)
        longest = min(
            self._cache.block_size, limits.max_step_token_count, limits.max_sequence_token_count
        )
        for row_count, length in ((1, 1), (rows, 1), (1, longest)):
            batch = _warm_up_batch(row_count, length)
            logits = self._weights.executor.run(batch, batch.query_starts[1:] - 1)
            if logits.shape[0]:
                sample(logits, _warm_up_sampling(batch))
        self._cache.clear_null_block()

    def _conclude(self, plan: StepPlan, interest: LogitBatch, logits: torch.Tensor) -> StepResult:
        """Samples or holds each of the logits [L, vocabulary], as its kind says."""
        held = interest.are(LogitKind.HOLD)
        if not held.any():
            return self._sample_now(plan, interest, logits)
        waiting = interest.take(held).rows
        self._held.hold(waiting, _take(logits, held))
        self._state.record_held(waiting, plan.step_id)
        result = self._sample_now(plan, interest.take(~held), _take(logits, ~held))
        return replace(result, held_rows=waiting)

    def _sample_now(self, plan: StepPlan, interest: LogitBatch, logits: torch.Tensor) -> StepResult:
        rows, positions = interest.rows, interest.positions
        return self._sample(plan.epoch, plan.step_id, rows, positions, logits, None)

    def _sample(
        self,
        epoch: int,
        step_id: int,
        rows: IntColumn,
        positions: IntColumn,
        logits: torch.Tensor,
        masks: MaskBatch | None,
    ) -> StepResult:
        state = self._state
        if not rows.size:
            return StepResult(epoch, step_id)
        sampled = sample(logits, self._sampling.gather(rows, positions, masks))
        sound = ~(sampled.invalid_logits | sampled.empty_mask)
        tokens = sampled.tokens[sound]
        state.record_sampled(rows[sound], tokens, step_id)
        state.record_faults(rows[~sound], step_id)
        return StepResult(
            epoch=epoch,
            step_id=step_id,
            rows=rows[sound],
            token_counts=np.ones(tokens.size, dtype=np.int32),
            tokens=tokens,
            faults=(
                *_faults(
                    rows[sampled.invalid_logits],
                    RowFaultKind.INVALID_LOGITS,
                    "the logits have no finite maximum",
                ),
                *_faults(rows[sampled.empty_mask], RowFaultKind.EMPTY_MASK, "no token is allowed"),
            ),
        )


def _take(logits: torch.Tensor, members: BoolColumn) -> torch.Tensor:
    """Copies of the rows of logits [L, vocabulary] that a mask [L] selects."""
    indices = torch.from_numpy(np.flatnonzero(members)).to(logits.device)
    return logits.index_select(0, indices)


def _faults(rows: IntColumn, kind: RowFaultKind, detail: str) -> tuple[RowFault, ...]:
    return tuple(RowFault(row, kind, detail) for row in rows.tolist())


def _warm_up_batch(row_count: int, length: int) -> StepBatch:
    """Inputs of `row_count` sequences of `length` tokens, all in the null block."""
    positions = np.tile(np.arange(length, dtype=np.int32), row_count)
    return StepBatch(
        query_starts=np.arange(row_count + 1, dtype=np.int32) * np.int32(length),
        context_lengths=np.full(row_count, length, dtype=np.int32),
        block_tables=np.zeros((row_count, 1), dtype=np.int32),
        positions=positions,
        slots=positions,
        token_ids=np.zeros_like(positions),
    )


def _warm_up_sampling(batch: StepBatch) -> SamplingBatch:
    """A plain draw of one token for each sequence."""
    count = batch.context_lengths.size
    parameters = SamplingColumns.empty(count)
    for index in range(count):
        parameters.put(index, SamplingParameters())
    return SamplingBatch(parameters, batch.context_lengths)

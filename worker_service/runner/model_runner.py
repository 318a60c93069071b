"""The real runner: a plan in, tokens out. Only what all models share.

It joins collaborators and has no policy of its own: RequestState keeps the rows, InputBatch makes
a step's inputs, the executor runs them, the sampler draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import (
    GrammarMasks,
    RowFault,
    RowFaultKind,
    SamplePlan,
    StepPlan,
    StepResult,
)
from worker_service.runner.device import free_bytes
from worker_service.runner.executor import Executor
from worker_service.runner.held_logits import HeldLogits
from worker_service.runner.input_batch import InputBatch, prepare
from worker_service.runner.interface import CompletedStep, PendingStep
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.request_state import RequestState
from worker_service.sampling.sampler import MaskBatch, SamplingBatch, sample


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """Logits [S, vocabulary] that are not sampled yet, their `rows` and the new tokens'
    `positions`, int32 [S]."""

    values: torch.Tensor
    rows: IntColumn
    positions: IntColumn

    def take(self, members: npt.NDArray[np.bool_]) -> _Logits:
        """Those of some rows, by a mask [S]."""
        chosen = torch.from_numpy(np.flatnonzero(members)).to(self.values.device)
        return _Logits(
            self.values.index_select(0, chosen), self.rows[members], self.positions[members]
        )


class ModelRunner:
    """interface.Runner on a device. Not thread-safe but for `capability`: one thread owns it."""

    def __init__(
        self,
        capability: Capability,
        executor: Executor,
        cache: KVCache,
        device: torch.device,
    ) -> None:
        self._capability = capability
        self._executor = executor
        self._cache = cache
        self._vocabulary_size = capability.model.vocabulary_size
        self._device = device
        self._state = RequestState(
            capability.limits, cache.block_count, cache.block_size, self._vocabulary_size
        )
        self._held = HeldLogits()

    def capability(self) -> Capability:
        return self._capability

    def memory_pool(self) -> MemoryPool:
        return MemoryPool(
            block_count=self._cache.block_count,
            block_token_count=self._cache.block_size,
            bytes_per_block=self._cache.bytes_per_block,
            layer_groups=self._cache.layer_groups,
            used_block_count=self._state.used_block_count(),
            weights_bytes=self._executor.weights_bytes,
            kv_bytes=self._cache.byte_count,
            workspace_bytes=self._executor.workspace_bytes,
            free_bytes=free_bytes(self._device),
        )

    def reset(self) -> None:
        self._state.reset()
        self._held.clear()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        state, rows = self._state, plan.scheduled.rows
        state.apply(plan)
        self._held.drop(plan.removed_rows.tolist())
        self._held.drop(rows.tolist())
        self._executor.take_blocks(plan)
        if not rows.size:
            return CompletedStep(StepResult(plan.epoch, plan.step_id))
        logits = self._compute(plan)
        held = state.held(logits.rows)
        if not held.any():
            return CompletedStep(self._sample(plan.epoch, plan.step_id, logits, None))
        waiting = logits.take(held)
        self._held.hold(waiting.rows, waiting.values)
        state.record_held(waiting.rows, plan.step_id)
        result = self._sample(plan.epoch, plan.step_id, logits.take(~held), None)
        return CompletedStep(replace(result, held_rows=waiting.rows))

    @torch.inference_mode()
    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        state, rows = self._state, plan.rows
        state.require_held(rows, plan.step_id)
        masks = None if plan.masks is None else self._check_masks(plan.masks, rows)
        logits = _Logits(self._held.take(rows), rows, state.known_counts[rows])
        return CompletedStep(self._sample(plan.epoch, plan.step_id, logits, masks))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs a decoding and an extending step over the null block, and the sampler.

        The first request then meets kernels that are made and buffers that are there.
        """
        limits = self._capability.limits
        rows = min(8, limits.max_sequence_count, limits.max_step_token_count)
        longest = min(
            self._cache.block_size, limits.max_step_token_count, limits.max_sequence_token_count
        )
        for row_count, length in ((1, 1), (rows, 1), (1, longest)):
            logits = self._executor.run(_warm_up_batch(row_count, length))
            zeros = np.zeros(row_count, dtype=np.int32)
            ones = np.ones(row_count, dtype=np.float32)
            sample(
                logits,
                SamplingBatch(ones, zeros, ones, 0 * ones, zeros.astype(np.uint64), zeros),
                None,
            )
        self._cache.clear_null_block()

    def _compute(self, plan: StepPlan) -> _Logits:
        """Runs an applied plan that schedules rows."""
        batch = prepare(plan, self._state)
        logits = self._executor.run(batch)
        self._state.advance(plan.scheduled)
        return _Logits(logits, batch.sampled_rows, batch.sampled_positions)

    def _sample(
        self, epoch: int, step_id: int, logits: _Logits, masks: MaskBatch | None
    ) -> StepResult:
        rows, state = logits.rows, self._state
        if not rows.size:
            return StepResult(epoch, step_id)
        sampled = sample(
            logits.values,
            SamplingBatch(
                temperature=state.temperature[rows],
                top_k=state.top_k[rows],
                top_p=state.top_p[rows],
                min_p=state.min_p[rows],
                seeds=state.seed[rows],
                positions=logits.positions,
            ),
            masks,
        )
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

    def _check_masks(self, masks: GrammarMasks, rows: IntColumn) -> MaskBatch:
        """Finds each masked row among those that are sampled. Raises PlanInvalid for others."""
        path = "grammar_masks"
        words = -(-self._vocabulary_size // 32)
        if masks.bitmasks.shape != (masks.rows.size, words):
            raise PlanInvalid(
                f"{path}.bitmasks", f"{words} words for each of {masks.rows.size} rows are due"
            )
        if np.unique(masks.rows).size != masks.rows.size:
            raise PlanInvalid(f"{path}.rows", "must be distinct")
        if not np.isin(masks.rows, rows).all():
            raise PlanInvalid(f"{path}.rows", "must be among the rows that are sampled")
        order = np.argsort(rows)
        indices: npt.NDArray[np.int64] = order[np.searchsorted(rows, masks.rows, sorter=order)]
        return MaskBatch(indices, masks.bitmasks)


def _faults(rows: IntColumn, kind: RowFaultKind, detail: str) -> tuple[RowFault, ...]:
    return tuple(RowFault(row, kind, detail) for row in rows.tolist())


def _warm_up_batch(row_count: int, length: int) -> InputBatch:
    """Inputs of `row_count` sequences of `length` tokens, all in the null block."""
    rows = np.arange(row_count, dtype=np.int32)
    lengths = np.full(row_count, length, dtype=np.int32)
    starts = np.arange(row_count + 1, dtype=np.int32) * np.int32(length)
    positions = np.tile(np.arange(length, dtype=np.int32), row_count)
    return InputBatch(
        rows=rows,
        query_lengths=lengths,
        query_starts=starts,
        context_lengths=lengths,
        token_ids=np.zeros_like(positions),
        positions=positions,
        slots=positions,
        block_tables=np.zeros((row_count, 1), dtype=np.int32),
        logit_indices=starts[1:] - 1,
        sampled_rows=rows,
        sampled_positions=lengths,
    )

"""A runner without a model or torch: deterministic tokens behind a latency model.

It keeps the real runner's contract through the same RequestState and input preparation, and a KV
pool of one 64-bit number per slot. A sampled token depends on every number its block table leads to
and on their order, so a mistake in anybody's block accounting changes tokens, as it would with a
model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
)
from worker_service.domain.columns import NULL_BLOCK, IntColumn
from worker_service.domain.plan import (
    RowFault,
    RowFaultKind,
    SamplePlan,
    StepPlan,
    StepResult,
    WeightVersion,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.input_batch import prepare
from worker_service.runner.interface import CompletedStep, PendingStep
from worker_service.runner.logit_batch import LogitBatch, LogitKind
from worker_service.runner.request_state import RequestState
from worker_service.sampling.masks import find_masks
from worker_service.sampling.state import SamplingState

_Words = npt.NDArray[np.uint64]
_BYTES_PER_SLOT = 8


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
    """What is pretended. `block_count` includes the null block."""

    name: str
    vocabulary_size: int
    limits: Limits
    block_count: int
    block_size: int = 16
    architecture: str = "Simulated"
    random_seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A held row's stand-in for logits. A faulty row gets no token."""

    preference: np.uint64
    fault: RowFault | None


class SimulatedRunner:
    """runner.interface.Runner. `sleep` and `clock` are in seconds.

    `provoke` is called on the device thread with each plan once it is applied: what it raises, the
    step raises; rows it returns faults for get no token.
    """

    def __init__(
        self,
        model: SimulatedModel,
        latency: SimulatedLatency,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        provoke: Callable[[StepPlan], Sequence[RowFault]] = lambda plan: (),
    ) -> None:
        self._model = model
        self._latency = latency
        self._sleep = sleep
        self._clock = clock
        self._provoke = provoke
        self._state = RequestState(
            model.limits, model.block_count, model.block_size, model.vocabulary_size
        )
        self._sampling = SamplingState(model.limits.max_sequence_count)
        # No plan may write to the null block, so it stays zero and padding adds nothing.
        self._kv: _Words = np.zeros((model.block_count, model.block_size), dtype=np.uint64)
        self._held: dict[int, _Held] = {}
        content = f"twinplane simulated model, vocabulary {model.vocabulary_size}"
        self._weight_version = WeightVersion(1, hashlib.sha256(content.encode()).hexdigest())

    def capability(self) -> Capability:
        model = self._model
        return Capability(
            device=Device(DeviceKind.SIMULATED, "simulated"),
            model=Model(model.name, model.architecture, model.vocabulary_size, DataType.FLOAT32),
            weight_version=self._weight_version,
            limits=model.limits,
            features=frozenset({Feature.HELD_SAMPLING, Feature.BATCH_INVARIANT}),
            executor="simulated",
            attention_backend="simulated",
            random_seed=model.random_seed,
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
            kv_bytes=self._kv.nbytes,
            workspace_bytes=0,
            free_bytes=0,
        )

    def reset(self) -> None:
        self._state.reset()
        self._held.clear()

    def launch(self, plan: StepPlan) -> PendingStep:
        started = self._clock()
        self._sampling.check(plan)
        self._state.apply(plan)
        for sequence in plan.added:
            self._sampling.add(sequence)
        for row in (*plan.removed_rows.tolist(), *plan.scheduled.rows.tolist()):
            self._held.pop(row, None)
        faults = tuple(self._provoke(plan))
        rows, preferences = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint64)
        held = np.empty(0, dtype=bool)
        latency = 0.0
        if plan.scheduled.rows.size:
            batch, interest = prepare(plan, self._state)
            self._kv.reshape(-1)[batch.slots] = _mix(batch.token_ids, batch.positions)
            self._state.advance(plan.scheduled)
            rows, held = interest.rows, interest.are(LogitKind.HOLD)
            preferences = self._preferences(batch, interest)
            latency = self._latency.of(batch)
        self._hold(rows[held], preferences[held], faults, plan.step_id)
        faults = tuple(fault for fault in faults if fault.row not in self._held)
        sound = ~held & ~np.isin(rows, _rows_of(faults))
        tokens = self._choose(preferences[sound])
        result = self._sampled(plan.epoch, plan.step_id, rows[sound], tokens, faults)
        result = replace(result, held_rows=rows[held])
        remaining = started + latency - self._clock()
        if latency > 0 and remaining > 0:
            self._sleep(remaining)
        return CompletedStep(result)

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        rows = plan.rows
        self._state.require_held(rows, plan.step_id)
        vocabulary = self._model.vocabulary_size
        masks = None if plan.masks is None else find_masks(plan.masks, rows, vocabulary)
        held = [self._held.pop(row) for row in rows.tolist()]
        tokens = self._choose(np.array([each.preference for each in held], dtype=np.uint64))
        faults = {each.fault.row: each.fault for each in held if each.fault is not None}
        if masks is not None:
            for index, allowed in zip(
                masks.indices.tolist(), masks.allowed(vocabulary), strict=True
            ):
                row, choices = int(rows[index]), np.flatnonzero(allowed)
                if choices.size:  # the first from the free token on, around the end
                    place = int(np.searchsorted(choices, tokens[index]))
                    tokens[index] = choices[place % choices.size]
                elif row not in faults:
                    faults[row] = RowFault(row, RowFaultKind.EMPTY_MASK, "no token is allowed")
        sound = ~np.isin(rows, list(faults))
        return CompletedStep(
            self._sampled(
                plan.epoch, plan.step_id, rows[sound], tokens[sound], tuple(faults.values())
            )
        )

    def _hold(
        self, rows: IntColumn, preferences: _Words, faults: Sequence[RowFault], step_id: int
    ) -> None:
        by_row = {fault.row: fault for fault in faults}
        for row, preference in zip(rows.tolist(), preferences, strict=True):
            self._held[row] = _Held(preference, by_row.get(row))
        self._state.record_held(rows, step_id)

    def _sampled(
        self,
        epoch: int,
        step_id: int,
        rows: IntColumn,
        tokens: IntColumn,
        faults: tuple[RowFault, ...],
    ) -> StepResult:
        self._state.record_sampled(rows, tokens, step_id)
        self._state.record_faults(_rows_of(faults), step_id)
        return StepResult(epoch, step_id, rows, np.ones_like(rows), tokens, faults=faults)

    def _preferences(self, batch: StepBatch, interest: LogitBatch) -> _Words:
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
        weights = _position_weights(np.arange(tables.shape[1] * size, dtype=np.uint64))
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
            sums[partial] += (blocks * _position_weights(positions)).sum(axis=1, dtype=np.uint64)
        own = self._sampling.gather(interest.rows, interest.positions).parameters
        seeds = np.where(own.temperature > 0, own.seed, np.uint64(0))
        return _draw(sums, seeds, interest.positions.astype(np.uint64))

    def _choose(self, preferences: _Words) -> IntColumn:
        return (preferences % np.uint64(self._model.vocabulary_size)).astype(np.int32)


def expected_tokens(
    prompt: Sequence[int], count: int, sampling: SamplingParameters, vocabulary_size: int
) -> list[int]:
    """The `count` tokens a simulated worker samples after a prompt, whatever the batching."""
    tokens = list(prompt)
    seed = sampling.seed if sampling.temperature > 0 else 0
    for _ in range(count):
        positions = np.arange(len(tokens), dtype=np.uint64)
        kv = _mix(np.array(tokens, dtype=np.int32), positions.astype(np.int32))
        total = (kv * _position_weights(positions)).sum(dtype=np.uint64, keepdims=True)
        drawn = _draw(
            total, np.array([seed], dtype=np.uint64), np.array([len(tokens)], dtype=np.uint64)
        )
        tokens.append(int(drawn[0] % np.uint64(vocabulary_size)))
    return tokens[len(prompt) :]


def _mix(token_ids: IntColumn, positions: IntColumn) -> _Words:
    """What a token at a position leaves in the KV, uint64 [tokens]."""
    return _scramble((token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64))


def _position_weights(positions: _Words) -> _Words:
    """Odd factors that tell the order of equal contents apart."""
    return positions * np.uint64(2) + np.uint64(1)


def _draw(sums: _Words, seeds: _Words, positions: _Words) -> _Words:
    return _scramble(sums ^ _scramble(seeds ^ _scramble(positions)))


def _scramble(values: _Words) -> _Words:
    """SplitMix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom numbers)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _rows_of(faults: Sequence[RowFault]) -> IntColumn:
    return np.array([fault.row for fault in faults], dtype=np.int32)

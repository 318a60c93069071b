"""Drives a ModelRunner as a controller would: keeps each row's log and blocks, makes plans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import (
    AddedSequence,
    GrammarMasks,
    OutputKind,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    StepResult,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.load import load_runner
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import RunnerOptions

GREEDY = SamplingParameters(0.0, 0, 1.0, 0.0, 0)


def column(values: Iterable[int]) -> IntColumn:
    return np.array(list(values), dtype=np.int32)


def options(folder: Path, **changes: Any) -> RunnerOptions:
    """Small settings for a small model on the CPU."""
    values: dict[str, Any] = {
        "model_folder": folder,
        "model_name": "tiny",
        "device": "cpu",
        "data_type": None,
        "block_size": 4,
        "kv_cache_bytes": 4 << 20,
        "max_sequence_count": 16,
        "max_step_token_count": 256,
        "max_sequence_token_count": None,
        "executor": None,
        "attention_backend": None,
        "thread_count": 2,
        "random_seed": 0,
        "progress": lambda line: None,
    }
    return RunnerOptions(**{**values, **changes})


def build(folder: Path, **changes: Any) -> ModelRunner:
    return load_runner(options(folder, **changes))


@dataclass(slots=True, eq=False)
class _Row:
    tokens: list[int]
    sampling: SamplingParameters
    blocks: list[int]
    computed: int
    known_by_worker: int
    output: OutputKind
    adapter_slot: int = 0
    entered: bool = False


@dataclass(slots=True, eq=False)
class RunnerRig:
    """One epoch of a runner. Blocks are handed out shuffled, so tables are no ranges."""

    runner: ModelRunner
    rows: dict[int, _Row] = field(default_factory=dict)
    step_id: int = 0
    free: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner.reset()
        pool = self.runner.memory_pool()
        blocks = np.random.default_rng(3).permutation(np.arange(1, pool.block_count))
        self.free = blocks.tolist()

    def add(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: SamplingParameters = GREEDY,
        blocks: Sequence[int] = (),
        computed: int = 0,
        output: OutputKind = OutputKind.SAMPLE,
        adapter_slot: int = 0,
    ) -> None:
        """The next step adds the row, with `blocks` whose first `computed` tokens are a hit."""
        self.rows[row] = _Row(
            list(tokens), sampling, list(blocks), computed, len(tokens), output, adapter_slot
        )

    def remove(self, row: int) -> None:
        """The next step removes the row; its blocks are the next to be handed out again."""
        self.removed.append(row)
        self.free = self.rows.pop(row).blocks + self.free

    def plan(self, counts: Mapping[int, int]) -> StepPlan:
        """Schedules `counts` tokens of each row; rows are entered and given blocks as needed."""
        self.step_id += 1
        size = self.runner.memory_pool().block_token_count
        added, appended = [], []
        for row, count in counts.items():
            state = self.rows[row]
            if not state.entered:
                state.entered = True
                added.append(
                    AddedSequence(
                        row,
                        column(state.tokens),
                        len(state.tokens),
                        state.sampling,
                        state.output,
                        column(state.blocks),
                        state.computed,
                        state.adapter_slot,
                        self.runner.adapters.digest(state.adapter_slot) or ""
                        if state.adapter_slot
                        else "",
                    )
                )
            needed = -(-(state.computed + count) // size) - len(state.blocks)
            fresh = [self.free.pop(0) for _ in range(needed)]
            state.blocks += fresh
            appended.append(fresh)
        rows = [self.rows[row] for row in counts]
        # A token that the worker sampled in the step before comes from there.
        behind = [len(row.tokens) - row.known_by_worker for row in rows]
        assert max(behind, default=0) <= 1
        for row in rows:
            row.known_by_worker = len(row.tokens)
        plan = StepPlan(
            epoch=1,
            step_id=self.step_id,
            weight_version=self.runner.capability().weight_version,
            removed_rows=column(self.removed),
            added=tuple(added),
            scheduled=ScheduledRows(
                rows=column(counts),
                start_positions=column(row.computed for row in rows),
                token_counts=column(counts.values()),
                source_step_distances=column(behind),
                literal_token_counts=column(0 for _ in rows),
                appended_block_counts=column(len(fresh) for fresh in appended),
                appended_blocks=column(block for fresh in appended for block in fresh),
            ),
            fingerprint=bytes,
        )
        self.removed.clear()
        return plan

    def step(self, counts: Mapping[int, int]) -> StepResult:
        """Plans, runs and takes the tokens into the log."""
        result = self.runner.launch(self.plan(counts)).result()
        for row, count in counts.items():
            self.rows[row].computed += count
        self.take(result)
        return result

    def sample(
        self, rows: Sequence[int], masks: GrammarMasks | None = None, step_id: int | None = None
    ) -> StepResult:
        """Samples rows that a step, by default the last, has held."""
        plan = SamplePlan(1, self.step_id if step_id is None else step_id, column(rows), masks)
        result = self.runner.launch_sample(plan).result()
        self.take(result)
        return result

    def take(self, result: StepResult) -> None:
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            self.rows[row].tokens.append(token)

    def remaining(self, row: int) -> int:
        return len(self.rows[row].tokens) - self.rows[row].computed


def generate(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    count: int,
    sampling: Sequence[SamplingParameters] | None = None,
    chunk: int = 1 << 20,
    lag: int = 0,
    slots: Sequence[int] | None = None,
) -> list[list[int]]:
    """`count` tokens after each prompt, all rows together, prompts in chunks.

    Row i enters `lag` · i steps late, so that prompts and decoding mix. `slots` are the rows'
    adapters.
    """
    rig = RunnerRig(runner)
    outputs: dict[int, list[int]] = {}
    step = 0
    while len(outputs) < len(prompts) or any(len(out) < count for out in outputs.values()):
        for row, prompt in enumerate(prompts):
            if row not in outputs and step >= lag * row:
                rig.add(
                    row,
                    prompt,
                    GREEDY if sampling is None else sampling[row],
                    adapter_slot=0 if slots is None else slots[row],
                )
                outputs[row] = []
        counts = {
            row: min(chunk, rig.remaining(row)) for row, out in outputs.items() if len(out) < count
        }
        result = rig.step(counts)
        assert not result.faults
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            outputs[row].append(token)
        step += 1
    return [outputs[row] for row in range(len(prompts))]

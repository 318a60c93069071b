"""The stages of a pipeline work on different steps at the same time, over real loopback gRPC.

Their runners wait for each other as real stages do: a stage for what the one before it has
computed, the first one for tokens that the last one has still to sample.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from control_plane.shell.limits import SchedulingSettings
from tests.simulation.test_loopback import PROMPTS, alone, driven, generate
from tests.support.rank_rig import INSTANT, LIMITS, MODEL, Ranks, RankServer, place
from worker_service.domain.plan import StepPlan
from worker_service.runner.interface import PendingStep
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

PATIENCE = 30.0
"""Seconds after which a wait is given up: generous, for a busy machine."""
FIRST, LAST = 16, 30
"""The steps that are looked at: all prompts are computed, and no row is at its end."""


class Line:
    """What the stages of one replica tell each other."""

    def __init__(self, stage_count: int) -> None:
        self.stage_count = stage_count
        self.begun = [0] * stage_count
        self.ended = [0] * stage_count
        self.together: list[int] = []
        """Steps of the last stage during which every other stage has begun a later one."""
        self.alone: list[int] = []
        """Those during which they did not."""
        self._changed = threading.Condition()

    def run(self, stage: int, plan: StepPlan, work: Callable[[], PendingStep]) -> PendingStep:
        step_id, last = plan.step_id, self.stage_count - 1
        distances = plan.scheduled.source_step_distances
        with self._changed:
            if stage:
                assert self._wait(lambda: self.ended[stage - 1] >= step_id)
            elif distances.any():
                source = step_id - int(distances[distances > 0].min())
                assert self._wait(lambda: self.ended[last] >= source)
            self.begun[stage] = step_id
            self._changed.notify_all()
        pending = work()
        with self._changed:
            if stage == last and FIRST <= step_id <= LAST and not self.alone:
                seen = self._wait(lambda: self._are_ahead_of(step_id))
                (self.together if seen else self.alone).append(step_id)
            self.ended[stage] = step_id
            self._changed.notify_all()
        return pending

    def _are_ahead_of(self, step_id: int) -> bool:
        """Whether each stage before the last has begun a step that the one behind it has not."""
        behind = range(self.stage_count - 1, 0, -1)
        return all(
            begun >= step_id + further
            for begun, further in zip(self.begun[:-1], behind, strict=True)
        )

    def _wait(self, condition: Callable[[], bool]) -> bool:
        return self._changed.wait_for(condition, PATIENCE)


class Stage(SimulatedRunner):
    """One stage of a line."""

    def __init__(
        self, model: SimulatedModel, latency: SimulatedLatency, line: Line, **settings: Any
    ) -> None:
        super().__init__(model, latency, **settings)
        self._line = line
        self._place = model.ranks.pipeline[0]

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._line.run(self._place, plan, lambda: super(Stage, self).launch(plan))


@pytest.mark.parametrize(("stage_count", "rows"), [(2, 4), (2, 5), (3, 6), (4, 8)])
async def test_stages_work_at_the_same_time(stage_count: int, rows: int) -> None:
    """While the last stage has a step, every other one begins a later one. No clock tells that:
    the last one goes on when they have."""
    line = Line(stage_count)
    limits = replace(
        LIMITS,
        max_sequence_count=rows,
        max_step_token_count=512,
        max_inflight_step_count=stage_count + 1,
    )
    servers = [
        RankServer(
            place(stage, 1, stage_count),
            model=replace(MODEL, limits=limits),
            latency=INSTANT,
            kind=partial(Stage, line=line),  # type: ignore[arg-type]
        )
        for stage in range(stage_count)
    ]
    names = list(PROMPTS)[:rows]
    async with (
        Ranks(servers) as replica,
        driven(replica.worker(), SchedulingSettings()) as fleet,
    ):
        told = await generate(fleet, names)
        stats = fleet.replicas[0].stats()
    expected = await alone()
    assert told == {name: expected[name] for name in names}
    assert line.alone == []
    assert line.together == list(range(FIRST, LAST + 1))
    assert stats is not None
    assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)


async def test_without_async_scheduling_stages_work_one_at_a_time() -> None:
    """And tokens are the same."""
    line = Line(2)
    servers = [
        RankServer(place(stage, 1, 2), kind=partial(Stage, line=line))  # type: ignore[arg-type]
        for stage in range(2)
    ]
    line.alone.append(0)  # nobody waits for who is not to come
    scheduling = SchedulingSettings(async_scheduling=False)
    async with Ranks(servers) as replica, driven(replica.worker(), scheduling) as fleet:
        assert await generate(fleet, list(PROMPTS)) == await alone()

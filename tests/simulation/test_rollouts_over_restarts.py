"""A control plane that is killed in the middle of a rollout: what its next life does, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from control_plane.core.rollout import Rollout, RolloutState, Weights
from control_plane.core.weights import DiskSource, InFlightPolicy
from control_plane.shell.rollout_store import RolloutStore
from control_plane.shell.rollouts import RESUME_SECONDS, Rollouts
from tests.simulation.fake_machine import WEIGHTS, Machine, digest_at
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual


@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_who_is_to_end_with_the_old_weights_may_come_back_to_them(
    policy: InFlightPolicy, tmp_path: Path
) -> None:
    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    before = Weights(digest=WEIGHTS, source=DiskSource("start"))
    target = Weights("one", digest_at("one"), DiskSource("one"))
    store = RolloutStore(tmp_path)
    store.save(Rollout("r", target, before, policy=policy))

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(), lambda: 0.02) for _ in range(2)]
        async with running(loop, workers) as rig:
            began = loop.time()
            rollouts = Rollouts(
                rig.fleet, store, clock=loop.time, new_id=lambda: "id", in_thread=at_once
            )
            task = rig.group.create_task(rollouts.run())
            async with asyncio.timeout(60.0):
                await until(lambda: any(worker.machine.commit_count for worker in workers))
                waits = loop.time() - began >= RESUME_SECONDS
                assert waits == (policy is InFlightPolicy.FINISH_ON_OLD)
                await until(lambda: _state(rollouts) is RolloutState.DONE)
            assert loop.time() - began < RESUME_SECONDS + 1.0, "only once"
            task.cancel()

    try:
        run_virtual(main)
    finally:
        store.close()


def _state(rollouts: Rollouts) -> RolloutState:
    assert rollouts.rollout is not None
    return rollouts.rollout.state

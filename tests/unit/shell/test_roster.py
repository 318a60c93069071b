"""Which workers may serve beside each other, and that replicas run from when they join until they
have left; virtual time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.plan import WeightVersion
from control_plane.shell.ports import WorkerElsewhere, WorkerUnusable
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]
OTHER_WEIGHTS = WeightVersion(1, "b" * 64)


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({}, None),
        ({"incarnation_id": "fake-0.1"}, "is here already, as replica 0"),
        ({"incarnation_id": "fake-0.1", "worker_id": "fake-0"}, "is here already, as replica 0"),
        ({"worker_id": "fake-0"}, None),
        ({"worker_id": "fake-0", "weight_version": OTHER_WEIGHTS}, None),
        ({"weight_version": OTHER_WEIGHTS}, "weights are not those of replica 0"),
        ({"weight_version": WeightVersion(2, "a" * 64)}, None),
        ({"vocabulary_size": 98}, "vocabulary is not that of replica 0"),
        ({"max_sequence_count": 1, "max_sequence_token_count": 16}, None),
    ],
    ids=[
        "as the other", "the same process", "the same under its id", "a new life of it",
        "a new life with other weights", "other weights", "the same weights of another generation",
        "another vocabulary", "smaller",
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", ["is attached", "is being claimed", "leaves", "is lost"])
def test_who_may_serve_beside_another(
    first: str, changes: dict[str, Any], objection: str | None
) -> None:
    """One that is being claimed is known by its process only; one that leaves, or is lost, is in
    nobody's way."""

    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        async with running(loop, worker) as rig:
            (here,) = rig.fleet.replicas
            newcomer = rig.fleet.join(FakeWorker(Machine(name="new")), "new:1")
            info = replace(Machine(name="new").info(), **changes)
            if first in ("is being claimed", "is lost"):
                worker.kill()
                await until(lambda: not here.attached)
            if first == "is being claimed":
                here.life.claiming = "fake-0.1"
            if first == "leaves":
                here.is_leaving = True
            found = rig.fleet.roster.objection(newcomer, info)
            here.is_leaving = False
            counts = first == "is attached" or (
                first == "is being claimed" and "incarnation_id" in changes
            )
            if objection is None or not counts:
                assert found is None
            else:
                assert objection in str(found)
                is_here = isinstance(found, WorkerElsewhere)
                assert is_here == ("incarnation_id" in changes)
                assert is_here or isinstance(found, WorkerUnusable)

    run_virtual(main)


@pytest.mark.parametrize("count", range(1, 4))
def test_replicas_run_from_when_they_join_until_they_have_left(count: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(name=f"w{n}"), lambda: 0.01) for n in range(1 + count)]
        async with running(loop, workers[:1]) as rig, asyncio.timeout(60.0):
            joined = [rig.fleet.join(worker) for worker in workers[1:]]
            assert [own.number for own in rig.fleet.replicas] == list(range(1 + count))
            await rig.attached()
            for replica in (rig.fleet.replicas[0], *joined[:-1]):
                rig.fleet.leave(replica)
                await until(lambda replica=replica: replica not in rig.fleet.replicas)  # type: ignore[misc]
                assert rig.fleet.roster.member(replica.number) is None
                assert str(replica.number) not in rig.telemetry.replicas
            assert rig.fleet.replicas == joined[-1:]
            answer = rig.submit(request("r", PROMPT, 5))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 5)
            assert [len(worker.machine.executed_plans) > 0 for worker in workers] == [
                *[False] * count, True,
            ]  # fmt: skip

    run_virtual(main)


def test_one_that_leaves_alone_ends_what_it_has_before_it_goes() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 0.01)) as rig, asyncio.timeout(60.0):
            answer = rig.submit(request("r", PROMPT, 20))
            await until(lambda: bool(answer.tokens))
            rig.fleet.leave(rig.fleet.replicas[0])
            await rig.settled(answer)
            assert answer.error is None
            assert answer.tokens == expected_tokens(PROMPT, 20)
            await until(lambda: not rig.fleet.replicas)

    run_virtual(main)

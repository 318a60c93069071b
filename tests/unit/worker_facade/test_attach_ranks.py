"""Attach of a worker that executes plans with others: the rendezvous, and what comes of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.support.worker_rig import (
    MODEL,
    NO_LATENCY,
    PATIENCE,
    attach_request,
    first,
    refusal,
    serving,
    until,
    wanted,
)
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.lifecycle import LifecycleState
from worker_service.simulated.runner import SimulatedModel, SimulatedRunner

RANKS = RankCoordinates((1, 2), (1, 2))
"""That of the last rank: it does not answer."""
ANSWERING = RankCoordinates((0, 2), (1, 2))
POOL = model_runner_pb2.GetMemoryPoolRequest()


def model(ranks: RankCoordinates = RANKS) -> SimulatedModel:
    return replace(MODEL, ranks=ranks, rendezvous_address="" if ranks.rank else ":29500")


class Meeting(SimulatedRunner):
    """A rank whose meetings a test decides."""

    def __init__(self, ranks: RankCoordinates = ANSWERING) -> None:
        super().__init__(model(ranks), NO_LATENCY, sleep=lambda seconds: None)
        self.joined: list[Rendezvous] = []
        self.error: Exception | None = None
        self.waits = False
        self._abandoned = threading.Condition()
        self._oldest = 0

    def join(self, rendezvous: Rendezvous) -> None:
        waits = self.waits
        self.joined.append(rendezvous)
        with self._abandoned:
            if waits:
                assert self._abandoned.wait_for(lambda: self._oldest > rendezvous.epoch, PATIENCE)
                raise GroupLost("abandoned")
        if self.error is not None:
            raise self.error

    def abandon(self, before_epoch: int) -> None:
        with self._abandoned:
            self._oldest = before_epoch
            self._abandoned.notify_all()


def attach(epoch: int = 1, **rendezvous: Any) -> model_runner_pb2.AttachRequest:
    request = attach_request(epoch)
    given = {"address": "127.0.0.1:29500", "key": "k", "tensor_size": 2, "pipeline_size": 2}
    request.rendezvous.CopyFrom(model_runner_pb2.Rendezvous(**{**given, **rendezvous}))
    return request


NO_ADDRESSES = [
    "", ":", "host", "host:", ":29500", "host:0", "host:65536", "host:99999", "host:-1", "host:1 ",
    "host: 1", "host:x", "host:1:2", "fd00::1", "fd00::1:29500", "[fd00::1]", "[fd00::1]:", "[]:1",
    "[fd00::1:29500", "fd00::1]:29500", "[[fd00::1]]:1", "host:١", "host:123456",
]  # fmt: skip
NO_KEYS = ["", "a" * 129, "a b", "a/b", "ä", "a\n", "\x00", "a,b"]  # fmt: skip
NO_TIMEOUTS = [
    Duration(),
    Duration(seconds=-1),
    Duration(seconds=601),
    Duration(seconds=600, nanos=1),
    Duration(seconds=2**40),
    Duration(nanos=-1),
]
WRONG: list[tuple[str, dict[str, Any]]] = [
    *(("rendezvous.address", {"address": address}) for address in NO_ADDRESSES),
    *(("rendezvous.key", {"key": key}) for key in NO_KEYS),
    *(("rendezvous.timeout", {"timeout": timeout}) for timeout in NO_TIMEOUTS),
    *(("rendezvous.tensor_size", {"tensor_size": size}) for size in (0, 1, 3, 4, 2**32 - 1)),
    *(("rendezvous.pipeline_size", {"pipeline_size": size}) for size in (0, 1, 3, 4, 2**32 - 1)),
]


async def test_a_rendezvous_that_is_none_is_refused_by_its_field() -> None:
    async with serving(build=Meeting) as rig:
        for field, given in WRONG:
            refused = await refusal(rig.stub.Attach(attach(**given)))
            assert (refused.code, refused.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_PLAN",
            )
            assert refused.field == field, given
        assert rig.facade.worker_info().epoch == 0, "a refused claim changes nothing"


async def test_without_a_rendezvous() -> None:
    async with serving(build=Meeting) as rig:
        refused = await refusal(rig.stub.Attach(attach_request(1)))
        assert (refused.reason, refused.field) == ("INVALID_PLAN", "rendezvous")
        assert "one of 4 ranks" in refused.message


async def test_a_worker_that_executes_plans_alone_meets_nobody() -> None:
    async with serving() as rig:
        refused = await refusal(rig.stub.Attach(attach(tensor_size=1, pipeline_size=1)))
        assert (refused.reason, refused.field) == ("INVALID_PLAN", "rendezvous")
        await rig.attach()


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("gpu-0:1", "gpu-0", 1),
        ("10.0.0.7:65535", "10.0.0.7", 65535),
        ("[fd00::7]:29500", "fd00::7", 29500),
    ],
)
async def test_what_a_rank_is_told(address: str, host: str, port: int) -> None:
    runner = Meeting()
    async with serving(build=lambda: runner) as rig:
        await rig.stub.Attach(
            attach(3, address=address, timeout=Duration(seconds=1, nanos=5 * 10**8))
        )
        await rig.stub.GetMemoryPool(POOL)
        await rig.stub.Attach(attach(4, address=address, key="other"))
        await rig.stub.GetMemoryPool(POOL)
    assert runner.joined == [
        Rendezvous(3, host, port, "k", 1.5),
        Rendezvous(4, host, port, "other", 10.0),
    ]


@pytest.mark.parametrize("ranks", [ANSWERING, RANKS], ids=str)
async def test_one_rank_answers_and_all_acknowledge(ranks: RankCoordinates) -> None:
    digests = []
    for place in (ranks, RankCoordinates((0, 2), (0, 2))):
        async with serving(build=lambda place=place: Meeting(place)) as rig:  # type: ignore[misc]
            await rig.stub.Attach(attach())
            result = (await rig.stub.Forward(first())).result
            digests.append(result.digest)
            assert list(result.tokens) == (wanted(1) if place.answers else [])
            info = (
                await rig.stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest())
            ).worker_info
            assert info.rendezvous_address == ("" if place.rank else ":29500")
            assert (info.ranks.tensor_rank, info.ranks.pipeline_rank) == (
                place.tensor[0],
                place.pipeline[0],
            )
    assert digests[0] and digests[0] == digests[1]


async def test_ranks_that_do_not_meet_are_said_so_until_the_next_claim() -> None:
    runner = Meeting()
    runner.error = GroupLost("rank 3 did not come")
    async with serving(build=lambda: runner) as rig:
        await rig.stub.Attach(attach(1))
        for call in (rig.stub.GetMemoryPool(POOL), rig.stub.Forward(first())):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "GROUP_LOST")
            assert "rank 3 did not come" in refused.message
            assert refused.retry_after is not None
        assert rig.facade.lifecycle.state is LifecycleState.FAILED
        runner.error = None
        await rig.stub.Attach(attach(2))
        assert list((await rig.stub.Forward(first(epoch=2))).result.tokens) == wanted(1)
        assert rig.facade.lifecycle.state is LifecycleState.ACTIVE


async def test_a_bug_in_a_meeting_fails_the_epoch_and_not_the_worker() -> None:
    runner = Meeting()
    runner.error = ValueError("a bug")
    async with serving(build=lambda: runner) as rig:
        await rig.stub.Attach(attach(1))
        assert (await refusal(rig.stub.Forward(first()))).reason == "RUNNER_FAILED"
        runner.error = None
        await rig.stub.Attach(attach(2))
        assert list((await rig.stub.Forward(first(epoch=2))).result.tokens) == wanted(1)


async def test_a_newer_claim_does_not_wait_for_an_older_meeting() -> None:
    runner = Meeting()
    runner.waits = True
    async with serving(build=lambda: runner) as rig:
        await rig.stub.Attach(attach(1))
        older = asyncio.ensure_future(refusal(rig.stub.GetMemoryPool(POOL)))
        await until(lambda: len(runner.joined) == 1)
        runner.waits = False
        await asyncio.wait_for(rig.stub.Attach(attach(2)), PATIENCE / 2)
        await older
        assert list((await rig.stub.Forward(first(epoch=2))).result.tokens) == wanted(1)


async def test_claims_that_overtake_each_other_end_with_the_newest() -> None:
    runner = Meeting()
    runner.waits = True
    async with serving(build=lambda: runner) as rig:
        await rig.stub.Attach(attach(1))
        await until(lambda: len(runner.joined) == 1)
        claims = [asyncio.ensure_future(rig.stub.Attach(attach(epoch))) for epoch in (2, 3)]
        await asyncio.wait(claims, timeout=PATIENCE)
        runner.waits = False
        await rig.stub.Attach(attach(4))
        assert list((await rig.stub.Forward(first(epoch=4))).result.tokens) == wanted(1)
        assert runner.joined[-1].epoch == 4

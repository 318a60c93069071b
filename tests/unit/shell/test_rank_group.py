"""The ranks of a replica as one worker: claims in order, losses with a name, and no split claim."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from control_plane.core.plan import Message, SamplePlan, StepResult
from control_plane.core.tokens import Tokens
from control_plane.shell.ports import (
    Admit,
    MemoryPool,
    RefusalReason,
    WorkerInfo,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.rank_group import RankGroupWorker
from control_plane.shell.ranks import Claimed, RanksDiverged, Rendezvous
from tests.unit.shell.test_ranks import info

SECONDS = 20.0
MESSAGE = SamplePlan(1, 1, [])


@dataclass(eq=False)
class Process:
    """A worker, which any number of controllers reach."""

    info: WorkerInfo
    epoch: int = 0
    meeting: str = ""
    claims: list[tuple[str, int]] = field(default_factory=list)


class FakeRank:
    """One controller's port to a process. `pause` is awaited within each call."""

    def __init__(
        self, process: Process, who: str = "a", pause: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self.process = process
        self.address = f"{process.info.worker_id}:1"
        self.who = who
        self.pause = pause or (lambda: asyncio.sleep(0))
        self.fails: dict[str, Exception] = {}
        self.hangs: set[str] = set()
        self.calls: list[str] = []
        self.digest = b"same"
        self.attached = False

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        await self.pause()
        if what in self.hangs:
            await asyncio.Event().wait()
        if what in self.fails:
            raise self.fails[what]

    async def look(self) -> WorkerInfo:
        await self._do("look")
        return replace(self.process.info, epoch=self.process.epoch, rendezvous_address="h:1")

    async def claim(self, epoch: int, rendezvous: Rendezvous | None) -> Claimed:
        await self._do("claim")
        assert rendezvous is not None
        if epoch <= self.process.epoch:
            raise WorkerRefused(RefusalReason.STALE_EPOCH, f"epoch {epoch}")
        previous, self.process.epoch = self.process.epoch, epoch
        self.process.meeting = rendezvous.key
        self.process.claims.append((self.who, epoch))
        return Claimed(replace(self.process.info, epoch=epoch), previous)

    async def join(self, seconds: float) -> MemoryPool:
        await self._do("join")
        self.attached = True
        return MemoryPool(10, 4)

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Any:
        raise AssertionError("a rank is not attached to alone")

    async def send(self, message: Message) -> None:
        await self._do("send")

    async def receive(self) -> StepResult:
        await self._do("receive")
        return StepResult(1, 1, [], [], Tokens([]), digest=self.digest)

    async def ping(self) -> None:
        await self._do("ping")

    async def detach(self) -> None:
        self.attached = False


def processes(tensors: int = 2, stages: int = 2) -> list[Process]:
    return [
        Process(info(tensor, stage, tensors, stages))
        for stage in range(stages)
        for tensor in range(tensors)
    ]


def group(ranks: Sequence[FakeRank]) -> RankGroupWorker:
    keys = iter(range(1000))
    return RankGroupWorker(ranks, new_key=lambda: f"{ranks[0].who}-{next(keys)}")


def four() -> tuple[RankGroupWorker, list[FakeRank]]:
    ranks = [FakeRank(process) for process in processes()]
    return group(ranks[::-1]), ranks


async def test_all_are_claimed_under_one_epoch_above_every_one_seen() -> None:
    worker, ranks = four()
    ranks[2].process.epoch = 8
    attachment = await worker.attach()
    assert {rank.process.epoch for rank in ranks} == {9}
    (meeting,) = {rank.process.meeting for rank in ranks}
    assert attachment.previous_epoch == 0, "one of them was not left by the same claim"
    attachment = await worker.attach()
    assert {rank.process.epoch for rank in ranks} == {10}
    assert meeting not in {rank.process.meeting for rank in ranks}, "each claim has its own"
    assert attachment.previous_epoch == 9
    await worker.detach()
    assert not any(rank.attached for rank in ranks)


async def test_who_does_not_get_the_first_rank_leaves_the_others_alone() -> None:
    worker, ranks = four()
    ranks[0].fails["claim"] = WorkerRefused(RefusalReason.STALE_EPOCH, "another's")
    with pytest.raises(WorkerRefused) as raised:
        await worker.attach()
    assert raised.value.reason is RefusalReason.STALE_EPOCH
    assert all("claim" not in rank.calls for rank in ranks[1:])


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("what", ["look", "claim", "join"])
@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("gone"),
        WorkerUnusable("not a worker"),
        WorkerRefused(RefusalReason.WORKER_LOADING, "it loads"),
        WorkerRefused(RefusalReason.GROUP_LOST, "nobody came"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_one_rank_that_fails_an_attach_is_named(
    which: int, what: str, error: Exception
) -> None:
    worker, ranks = four()
    ranks[which].fails[what] = error
    with pytest.raises(type(error)) as raised:
        await worker.attach()
    assert ranks[which].address in str(raised.value)
    if isinstance(error, WorkerRefused):
        assert isinstance(raised.value, WorkerRefused) and raised.value.reason is error.reason
    ranks[which].fails.clear()
    await worker.attach()
    assert await worker.receive()


@pytest.mark.parametrize("which", range(4))
async def test_the_rank_that_died_is_named_and_not_those_that_miss_it(which: int) -> None:
    worker, ranks = four()
    await worker.attach()
    for place, rank in enumerate(ranks):
        if place != which:
            rank.fails["receive"] = WorkerRefused(RefusalReason.GROUP_LOST, "another is gone")
    slow = asyncio.Event()

    async def late() -> None:
        await slow.wait()

    ranks[which].pause = late
    ranks[which].fails["receive"] = WorkerLost("connection reset")
    asyncio.get_running_loop().call_later(0.05, slow.set)
    with pytest.raises(WorkerLost, match=ranks[which].address):
        await worker.receive()


@pytest.mark.parametrize("which", range(4))
async def test_the_rank_that_failed_is_named_and_not_those_that_miss_it(which: int) -> None:
    worker, ranks = four()
    await worker.attach()
    for rank in ranks:
        rank.fails["receive"] = WorkerRefused(RefusalReason.GROUP_LOST, "another is gone")
    ranks[which].fails["receive"] = WorkerRefused(RefusalReason.RUNNER_FAILED, "a bug", 7)
    with pytest.raises(WorkerRefused, match=ranks[which].address) as raised:
        await worker.receive()
    assert (raised.value.reason, raised.value.step_id) == (RefusalReason.RUNNER_FAILED, 7)


async def test_a_rank_that_hangs_does_not_hide_what_the_others_say() -> None:
    worker, ranks = four()
    await worker.attach()
    ranks[0].hangs.add("receive")
    ranks[3].fails["receive"] = WorkerRefused(RefusalReason.GROUP_LOST, "another is gone")
    with pytest.raises(WorkerRefused, match=ranks[3].address):
        await asyncio.wait_for(worker.receive(), SECONDS)


async def test_a_difference_ends_the_claim() -> None:
    worker, ranks = four()
    await worker.attach()
    ranks[1].digest = b"else"
    with pytest.raises(RanksDiverged, match=ranks[1].address):
        await worker.receive()


async def test_a_slow_rank_holds_up_no_other() -> None:
    worker, ranks = four()
    await worker.attach()
    ranks[0].hangs.add("send")
    sending = asyncio.ensure_future(worker.send(MESSAGE))
    async with asyncio.timeout(SECONDS):
        while not all("send" in rank.calls for rank in ranks):  # noqa: ASYNC110
            await asyncio.sleep(0)
    sending.cancel()
    await asyncio.wait([sending])


@pytest.mark.parametrize("which", range(4))
async def test_every_rank_has_to_answer_a_ping(which: int) -> None:
    worker, ranks = four()
    await worker.attach()
    await worker.ping()
    ranks[which].hangs.add("ping")
    pinging = asyncio.ensure_future(worker.ping())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not pinging.done()
    pinging.cancel()
    await asyncio.wait([pinging])


async def test_not_attached() -> None:
    worker, _ = four()
    for call in (worker.send(MESSAGE), worker.receive()):
        with pytest.raises(WorkerLost):
            await call


@pytest.mark.parametrize("seed", range(80))
async def test_controllers_that_contend_never_hold_a_part_each(seed: int) -> None:
    """Whatever the interleaving: when all have tried, every rank has the same claim, and whoever
    has it was told so unless somebody claimed over it."""
    rng = random.Random(seed)
    shared = processes(rng.choice((1, 2, 3)), 2)

    async def pause() -> None:
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)

    def controller(who: str) -> RankGroupWorker:
        return group([FakeRank(process, who, pause) for process in shared])

    async def tries(who: str) -> tuple[str, int] | None:
        worker, got = controller(who), None
        for _ in range(rng.randrange(1, 4)):
            try:
                got = who, (await worker.attach()).info.epoch
            except WorkerRefused as refused:
                assert refused.reason is RefusalReason.STALE_EPOCH
                got = None
            await pause()
        return got

    async with asyncio.timeout(SECONDS):
        held = await asyncio.gather(*(tries(who) for who in "abc"[: rng.randrange(2, 4)]))
    last = {process.claims[-1] for process in shared}
    assert len({process.meeting for process in shared}) == 1
    assert len(last) == 1, "two controllers hold a part each"
    (holder,) = last
    assert all(one is None or one == holder or one[1] < holder[1] for one in held)

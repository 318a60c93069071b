"""Which process gets which signal at which moment, and what its clients see; in virtual time.

Three streams of three seconds run beside a short one. The worker gets a signal, the control plane
gets one at the same time, or either alone. The table of what is right is `expected`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import product

import pytest

from control_plane.app import run_until_stopped
from control_plane.shell.engine import EngineDraining, EngineLost
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, settings
from tests.simulation.virtual_time import VirtualLoop, run_virtual

STEP_SECONDS = 0.1
TOKEN_COUNT = 30
SILENCE_LIMIT = 2.4
RECONNECT_SECONDS = 1.0
DRAIN_SECONDS = 10.0
SECOND_SIGNAL_AFTER = 0.2
SLACK = 1.0
"""Steps take their time, and looks at a silent worker and at the drain are not continuous."""

WORKER_SIGNALS = ("none", "TERM", "KILL", "KILL, back in 2", "STOP", "STOP 2", "STOP 8")
CONTROL_SIGNALS = ("none", "TERM, grace 30", "TERM, grace 1", "TERM twice")
MOMENTS = {"before the first token": 0.05, "mid-stream": 1.5, "after the last": 4.5}
PATIENCES = (5.0, 20.0)
CASES = list(product(WORKER_SIGNALS, CONTROL_SIGNALS, MOMENTS, PATIENCES))


@dataclass(frozen=True)
class Expected:
    """How the streams end, and how many seconds after the signal, with SLACK."""

    error: type[Exception] | None
    seconds: float


def expected(worker: str, control: str, moment: float, patience: float) -> Expected:
    """What is right. A stream that nothing disturbs ends by itself."""
    left = max(0.0, TOKEN_COUNT * STEP_SECONDS - moment)
    if not left:
        return Expected(None, 0.0)
    pause = {"KILL, back in 2": 2.0, "STOP 2": 2.0, "STOP 8": 8.0}.get(worker, 0.0)
    never_back = worker in ("KILL", "STOP")
    noticed = SILENCE_LIMIT if worker.startswith("STOP") else 0.0
    if never_back or pause > patience:
        ends = [Expected(EngineLost, max(patience, noticed))]
    else:
        ends = [Expected(None, left + pause)]
    is_lost = never_back or pause > max(noticed, RECONNECT_SECONDS)
    match control:
        case "TERM, grace 30":
            if is_lost:  # nobody waits for a worker while everything stops
                ends.append(Expected(EngineDraining, max(RECONNECT_SECONDS, noticed)))
        case "TERM, grace 1":
            ends.append(Expected(EngineDraining, 1.0))
        case "TERM twice":
            ends.append(Expected(EngineDraining, SECOND_SIGNAL_AFTER))
    return min(ends, key=lambda end: end.seconds)


@dataclass(slots=True, eq=False)
class Signals:
    """Implements StopEvents."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)


async def signal_worker(worker: FakeWorker, what: str) -> None:
    match what.split():
        case ["TERM"]:
            await worker.terminate(DRAIN_SECONDS)
        case ["KILL"]:
            worker.kill()
        case ["KILL,", "back", "in", seconds]:
            worker.kill()
            await asyncio.sleep(float(seconds))
            worker.reachable = True
        case ["STOP"]:
            worker.freeze()
        case ["STOP", seconds]:
            worker.freeze()
            await asyncio.sleep(float(seconds))
            worker.thaw()


async def signal_control(signals: Signals, what: str) -> None:
    if what == "none":
        return
    signals.first.set()
    if what == "TERM twice":
        await asyncio.sleep(SECOND_SIGNAL_AFTER)
        signals.second.set()


class World:
    """A control plane as its composition root runs it, its worker, and the time of every end."""

    def __init__(self, loop: VirtualLoop, grace: float, patience: float) -> None:
        self.loop = loop
        self.worker = FakeWorker(Machine(), lambda: STEP_SECONDS)
        self.rig = Rig(loop, [self.worker], settings(loss_patience=patience), 0)
        self.signals = Signals()
        self.readers: Callable[[], Awaitable[None]] = self._no_readers
        self.running = asyncio.create_task(
            run_until_stopped(self.rig.fleet, lambda: self.readers(), self.signals, grace)
        )
        self.ended_at: list[float] = []

    async def end_of(self, answer: Answer) -> None:
        while True:
            await asyncio.sleep(0.02)
            if answer.end_count:
                break
        self.ended_at.append(self.loop.time())

    async def _no_readers(self) -> None:
        """Every client reads at once."""


@pytest.mark.parametrize(("worker", "control", "moment", "patience"), CASES)
def test_every_signal_at_every_moment(
    worker: str, control: str, moment: str, patience: float
) -> None:
    right = expected(worker, control, MOMENTS[moment], patience)
    grace = 1.0 if control == "TERM, grace 1" else 30.0

    async def main(loop: VirtualLoop) -> None:
        world = World(loop, grace, patience)
        rig = world.rig
        await rig.attached()
        free = rig.stats().kv_free_tokens
        async with rig.group:
            prompts = [[5, 6, 7, n] for n in range(3)]
            answers = [
                rig.submit(request(f"r{n}", prompt, TOKEN_COUNT))
                for n, prompt in enumerate(prompts)
            ]
            short = rig.submit(request("short", [9], 1))
            ends = [asyncio.create_task(world.end_of(answer)) for answer in answers]
            await asyncio.sleep(MOMENTS[moment])
            struck = loop.time()
            striking = asyncio.gather(
                signal_worker(world.worker, worker), signal_control(world.signals, control)
            )
            await asyncio.wait(ends)
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = expected_tokens(prompt, TOKEN_COUNT)
            assert answer.tokens == whole[: len(answer.tokens)], "byte-identical up to its end"
            assert answer.end_count == 1
            assert (type(answer.error) if answer.error else None) is right.error
            assert right.error is not None or answer.tokens == whole
        assert short.tokens == expected_tokens([9], 1)[: len(short.tokens)]
        if right.seconds:
            waited = [at - struck for at in world.ended_at]
            assert right.seconds - STEP_SECONDS <= min(waited)
            assert max(waited) <= right.seconds + SLACK
        if control != "none":
            assert await world.running == 0
            assert loop.time() - struck <= right.seconds + SLACK
            assert rig.readiness[-1] is False
        else:
            await striking
            await asyncio.sleep(12.0)  # twice the longest time until the next claim
            gone = worker in ("TERM", "KILL", "STOP")
            assert rig.fleet.ready is not gone
            assert rig.stats().kv_free_tokens + rig.stats().kv_cached_tokens == (
                0 if gone else free
            )
        stats = rig.stats()
        assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
        await stop(striking, world.running)

    run_virtual(main)


async def stop(*tasks: asyncio.Future[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


@pytest.mark.parametrize("seconds", [0.0, 3.0, 8.0, 60.0])
def test_a_slow_reader_has_the_rest_of_the_grace(seconds: float) -> None:
    """Its tokens are all made; it needs some more seconds to take them."""

    async def main(loop: VirtualLoop) -> None:
        world = World(loop, 10.0, 60.0)
        await world.rig.attached()
        async with world.rig.group:
            world.rig.submit(request("a", [1, 2], 10))
            world.readers = lambda: asyncio.sleep(seconds)
            world.signals.first.set()
            assert await world.running == 0
        assert loop.time() == pytest.approx(min(10.0, 1.0 + seconds), abs=0.3)

    run_virtual(main)


def test_a_second_signal_does_not_wait_for_a_slow_reader() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop, 10.0, 60.0)
        await world.rig.attached()
        world.readers = lambda: asyncio.sleep(60.0)
        world.signals.first.set()
        await asyncio.sleep(1.0)
        assert not world.running.done()
        world.signals.second.set()
        assert await world.running == 0
        assert loop.time() < 1.5

    run_virtual(main)


@pytest.mark.parametrize("grace", [0.0, 1.0, 30.0])
def test_a_drain_of_a_fleet_that_never_had_a_worker_ends_at_once(grace: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop, grace, 60.0)
        world.worker.reachable = False
        await asyncio.sleep(5.0)
        world.signals.first.set()
        assert await world.running == 0
        assert loop.time() < 5.1

    run_virtual(main)


def test_a_connection_that_breaks_in_a_drain_is_only_a_pause() -> None:
    async def main(loop: VirtualLoop) -> None:
        world = World(loop, 30.0, 60.0)
        await world.rig.attached()
        async with world.rig.group:
            answer = world.rig.submit(request("a", [1, 2], TOKEN_COUNT))
            await asyncio.sleep(1.0)
            world.signals.first.set()
            await asyncio.sleep(0.5)
            world.worker.break_connection()
            assert await world.running == 0
        assert answer.tokens == expected_tokens([1, 2], TOKEN_COUNT)

    run_virtual(main)

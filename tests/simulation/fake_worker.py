"""The Worker port over fake_machine.py: its connection breaks, hangs and takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.weights import PreparedWeights, WeightsUpdate
from control_plane.shell.ports import (
    Admit,
    Attachment,
    WorkerLost,
    WorkerRefused,
)
from tests.simulation.fake_machine import Machine

ATTACH_TIMEOUT = 10.0
_LOOK_SECONDS = 0.02
_QUIET_LOOKS = 50


def no_delay() -> float:
    """A worker that takes no time."""
    return 0.0


class FakeWorker:
    """The Worker port over a Machine, with a connection that can break.

    `step_seconds` gives each step's time. `break_connection` loses everything in flight: results
    that have not been received never will be. Plans that were executed stay executed. While it is
    frozen, nothing answers and nothing breaks.
    """

    def __init__(self, machine: Machine, step_seconds: Callable[[], float] = no_delay) -> None:
        self.machine = machine
        self.step_seconds = step_seconds
        self.reachable = True
        self.running = asyncio.Event()
        self.running.set()
        self._device = asyncio.Event()
        self._device.set()
        self.prepare_seconds = self.commit_seconds = 0.0
        self.loses_commits = False
        """The connection breaks behind each commit, before its answer."""
        self.attach_count = 0
        self._last_epoch = 0
        self._connected = False
        self._plans: asyncio.Queue[StepPlan | None] = asyncio.Queue()
        self._running: StepPlan | None = None
        self._is_leaving = False

    @property
    def connected(self) -> bool:
        """Whether a claim's pipeline is open."""
        return self._connected

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        await asyncio.sleep(0)
        if not self.reachable:
            raise WorkerLost("unreachable")
        await self._thawed("no answer")
        if admit is not None:
            admit(self.machine.info())
        self.attach_count += 1
        if epoch is None:
            epoch = max(self.machine.epoch, self._last_epoch) + 1
        answer = self.machine.claim(epoch)
        self._last_epoch = epoch
        self._connected = True
        self._plans = asyncio.Queue()
        self._running = None
        return answer

    async def send(self, plan: StepPlan) -> None:
        await asyncio.sleep(0)
        if not self._connected:
            raise WorkerLost("connection broken")
        self._plans.put_nowait(plan)

    async def receive(self) -> StepResult:
        if not self._connected:
            raise WorkerLost("connection broken")
        plan = await self._plans.get()
        if plan is None:
            raise WorkerLost("connection broken")
        self._running = plan
        delay = self.step_seconds()
        if delay:
            await asyncio.sleep(delay)
        await self.running.wait()
        await self._device.wait()
        self._running = None
        if not self._connected:
            raise WorkerLost("connection broken")
        try:
            return self._execute(plan)
        except WorkerRefused:
            self._connected = False
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        result = self.machine.execute(plan)
        return replace(result, is_leaving=True) if self._is_leaving else result

    async def ping(self) -> None:
        await asyncio.sleep(0)
        await self.running.wait()
        if not self._connected:
            raise WorkerLost("connection broken")

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        await self._takes(self.prepare_seconds)
        return self.machine.prepare(update)

    async def commit(self, update_id: str, digest: str) -> WeightVersion:
        """Behind every message: none may be in flight, or a step would mix versions."""
        assert self._plans.empty() and self._running is None, "a step is in flight"
        await self._takes(self.commit_seconds)
        version = self.machine.commit(update_id, digest)
        await self._takes(0.0)
        if self.loses_commits:
            self.break_connection()
            raise WorkerLost("connection broken")
        return version

    async def abort(self, update_id: str) -> None:
        await self._takes(0.0)
        self.machine.abort(update_id)

    async def _takes(self, seconds: float) -> None:
        """Passes time, as long as the connection is whole and the process runs."""
        await asyncio.sleep(0)
        left = seconds
        while self._connected and left > 0:
            await asyncio.sleep(min(left, _LOOK_SECONDS))
            left -= _LOOK_SECONDS
        await self.running.wait()
        if not self._connected:
            raise WorkerLost("connection broken")

    async def detach(self) -> None:
        self._connected = False

    async def terminate(self, drain_seconds: float) -> None:
        """SIGTERM: says so with each result, and serves its claim until that ends, has had nothing
        to run for a second, or the drain is over; then it is gone for good."""
        self._is_leaving = True
        with suppress(TimeoutError):
            async with asyncio.timeout(drain_seconds):
                quiet_looks = 0
                while self._connected and quiet_looks < _QUIET_LOOKS:
                    await asyncio.sleep(_LOOK_SECONDS)
                    is_busy = self._running is not None or not self._plans.empty()
                    quiet_looks = 0 if is_busy else quiet_looks + 1
        self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self.reachable = self._is_leaving = False
        self._device.set()
        self.machine.restart()
        self.break_connection()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.running.clear()

    def thaw(self) -> None:
        """SIGCONT."""
        self.running.set()

    def hang(self) -> None:
        """The device finishes no step any more; the process answers."""
        self._device.clear()

    def go_on(self) -> None:
        """The device finishes what it was at."""
        self._device.set()

    async def _thawed(self, message: str) -> None:
        """Waits, as long as a call waits, for the thaw and for the step that runs. Raises
        WorkerLost."""
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT):
                await self.running.wait()
                await self._device.wait()
        except TimeoutError:
            raise WorkerLost(message) from None

    def break_connection(self, executed_count: int = 0) -> None:
        """The connection is gone; a receive that waits is woken.

        Up to `executed_count` of the plans that have arrived are executed before; nobody will ever
        know.
        """
        arrived = [] if self._running is None else [self._running]
        while not self._plans.empty():
            arrived.append(self._plans.get_nowait())
        for plan in arrived[:executed_count]:
            if self._connected and plan is not None and plan.epoch == self.machine.epoch:
                self.machine.execute(plan)
        self._connected = False
        self._plans.put_nowait(None)

"""Workers' processes behind a network on which anything may happen to a message."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping

from control_plane.core.plan import StepPlan, StepResult
from control_plane.shell.ports import Admit, Attachment, WorkerLost
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import ATTACH_TIMEOUT
from tests.simulation.poison import Effect, PoisonedWorker
from tests.simulation.scenario import DELAYS, Spec


class Host:
    """A worker's process: every control plane has a connection of its own to it."""

    def __init__(self, spec: Spec, name: str, rng: random.Random) -> None:
        self.machine: Machine = spec.machine(name)
        self.loss_rate = spec.loss_rate
        self.rng = rng
        self.connections: list[Connection] = []
        self.is_reachable = True
        self.running = asyncio.Event()
        self.running.set()
        self.passing = asyncio.Event()
        self.passing.set()
        self.silent_since = math.inf
        """When it gave its last sign of life; infinite: it gives them."""
        self.extra_seconds = 0.0
        self.is_quick = False
        self.twice = False
        self.swap = False

    def step_seconds(self) -> float:
        return 0.001 if self.is_quick else self.rng.choice(DELAYS) + self.extra_seconds

    def break_connections(self, executed: int = 0) -> None:
        for connection in self.connections:
            connection.break_connection(executed)

    def kill(self) -> None:
        """SIGKILL: rows and KV are gone, and nobody answers until `show`."""
        self.speak(self.running)  # whoever was stopped is dead, too
        self.hide()
        self.machine.restart()

    def hide(self) -> None:
        self._reach(False)
        self.break_connections()

    def show(self) -> None:
        self._reach(True)

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self.is_quick = True
        self.loss_rate = self.extra_seconds = 0.0
        self.twice = self.swap = False
        self.speak(self.running)
        self.speak(self.passing)
        self.show()

    def hush(self, gate: asyncio.Event, now: float) -> None:
        """It no longer runs, or nothing of it passes."""
        gate.clear()
        self.silent_since = min(self.silent_since, now)

    def speak(self, gate: asyncio.Event, now: float = math.inf) -> None:
        """It runs again, or what it says passes again: and be it what it said before it hung."""
        gate.set()
        if self.running.is_set() and self.passing.is_set():
            self.silent_since = math.inf
        elif self.passing.is_set():
            self.silent_since = now

    def _reach(self, is_reachable: bool) -> None:
        self.is_reachable = is_reachable
        for connection in self.connections:
            connection.reachable = is_reachable


class Connection(PoisonedWorker):
    """One control plane's way to a host. `on_message` is called before each result."""

    def __init__(
        self, host: Host, poison: Mapping[int, int], on_message: Callable[[], None]
    ) -> None:
        super().__init__(host.machine, poison, Effect.NAMED, host.step_seconds)
        self.host = host
        self.running = host.running
        self.reachable = host.is_reachable
        self._on_message = on_message
        self._late: list[StepResult] = []
        """Results that will come out of turn."""
        host.connections.append(self)

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        await self._passed()
        self._late.clear()
        answer = await super().attach(epoch, admit)
        await self._passed()
        return answer

    async def send(self, plan: StepPlan) -> None:
        if self._strikes():
            self.break_connection(self.host.rng.randrange(3))
        await super().send(plan)

    async def receive(self) -> StepResult:
        self._on_message()
        if self._late:
            return self._late.pop()
        result = await super().receive()
        await self.host.passing.wait()
        if self._strikes():
            self.break_connection(self.host.rng.randrange(3))
            raise WorkerLost("after the step was executed")
        if not self._connected:
            raise WorkerLost("connection broken")
        if self.host.twice:
            self.host.twice = False
            self._late.append(result)
        elif self.host.swap and self._plans.qsize():
            self.host.swap = False
            self._late.append(result)
            return await super().receive()
        return result

    async def ping(self) -> None:
        await self.host.passing.wait()
        await super().ping()
        await self.host.passing.wait()

    async def _passed(self) -> None:
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT):
                await self.host.passing.wait()
        except TimeoutError:
            raise WorkerLost("no answer") from None

    def _strikes(self) -> bool:
        return self.host.rng.random() < self.host.loss_rate

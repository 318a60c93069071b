"""The steps of one replica: plans go to its worker, and results come back into its core.

Each turn of the loop: take results, update the core, deliver the tokens, schedule, send. Async
scheduling is the same loop with one more plan in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from control_plane.core import invariants
from control_plane.core.events import SequenceOutput
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.scheduler import Scheduler
from control_plane.shell.heartbeat import Heartbeat
from control_plane.shell.interlude import Interlude
from control_plane.shell.ports import Clock, ReplicaMetrics, Worker
from control_plane.shell.step_lines import log_plan, log_result

_logger = logging.getLogger(__name__)


class Pipeline:
    """Runs a core against a worker that is attached, claim after claim.

    `number` names the replica in the log. `deliver` gets what each result brought, and when;
    `took_turn` is called when results were taken and the next step is not planned yet;
    `worker_leaves` with each result that says so; `exchanged` behind an interlude;
    `load_adapters` behind each planning.
    `check_invariants`: audit the core whenever it is idle (tests).
    """

    def __init__(
        self,
        number: int,
        worker: Worker,
        heartbeat: Heartbeat,
        *,
        deliver: Callable[[list[SequenceOutput], float], None],
        took_turn: Callable[[], None],
        worker_leaves: Callable[[], None],
        exchanged: Callable[[], None],
        load_adapters: Callable[[Scheduler], None],
        clock: Clock,
        metrics: ReplicaMetrics,
        check_invariants: bool = False,
    ) -> None:
        self._number = number
        self._worker = worker
        self._heartbeat = heartbeat
        self._deliver = deliver
        self._took_turn = took_turn
        self._worker_leaves = worker_leaves
        self._exchanged = exchanged
        self._load_adapters = load_adapters
        self._clock = clock
        self._metrics = metrics
        self._check_invariants = check_invariants
        self.interlude: Interlude | None = None
        """What is to be done before the next step, or once everybody has ended."""
        self.is_held = False
        """Nothing is sent: what is in flight comes, and then there is silence."""
        self._inbox: deque[StepResult | Exception] = deque()
        self._wake = asyncio.Event()
        self._planning_seconds = 0.0

    def wake(self) -> None:
        """The core may have something to do."""
        self._wake.set()

    async def run(self, core: Scheduler, goes_on: Callable[[], bool]) -> None:
        """Executes steps of a claim that is made, for as long as `goes_on` says so after a turn.

        Raises what ends the claim.
        """
        self._inbox.clear()
        reader = asyncio.create_task(self._read_results())
        try:
            await self._heartbeat.watched(self._run_steps(core, goes_on))
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _run_steps(self, core: Scheduler, goes_on: Callable[[], bool]) -> None:
        while True:
            if (interlude := self.interlude) is not None and interlude.is_due(core):
                if not core.inflight_count:
                    outputs = await interlude.run(core)
                    if self.interlude is interlude:
                        self.interlude = None
                    self._deliver(outputs, self._clock())
                    self._exchanged()
                    continue
            elif not self.is_held:
                await self._send_messages(core)
                self._load_adapters(core)
            if not goes_on():
                return
            await self._wake.wait()
            self._wake.clear()
            self._take_results(core)
            self._took_turn()

    async def _read_results(self) -> None:
        """Puts results, and what ended them, into the inbox; what is in flight bounds it."""
        try:
            while True:
                result = await self._worker.receive()
                self._inbox.append(result)
                self._heartbeat.heard(result)
                self._wake.set()
        except Exception as error:  # raised again by the loop, which knows what it means
            self._inbox.append(error)
            self._wake.set()

    async def _send_messages(self, core: Scheduler) -> None:
        while True:
            started = self._clock()
            message = core.next_message(started)
            self._planning_seconds += self._clock() - started
            if message is None:
                break
            if isinstance(message, StepPlan) and message.scheduled.rows:
                self._metrics.step_planned(sum(message.scheduled.token_counts))
                if _logger.isEnabledFor(logging.DEBUG):
                    log_plan(self._number, message, core.stats())
            self._heartbeat.sends(message)
            await self._worker.send(message)
        if self._check_invariants and not core.has_work:
            invariants.check(core)

    def _take_results(self, core: Scheduler) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Exception):
                raise event
            now = self._clock()
            outputs = core.update(event)
            self._deliver(outputs, now)
            control_seconds = self._planning_seconds + self._clock() - now
            self._planning_seconds = 0.0
            self._metrics.step_finished(event.executed_seconds, control_seconds)
            if event.is_leaving:
                self._worker_leaves()
            if _logger.isEnabledFor(logging.DEBUG):
                log_result(self._number, event, outputs, control_seconds)

"""The rollouts of a fleet: takes what operators ask, and brings replicas to it, until all is so.

One task, `run`, looks whenever something has changed, decides by core/rollout.py, writes that down,
and only then does it. So what it finds after a restart is never ahead of what it knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from control_plane.core.rollout import (
    Canary,
    Commit,
    Decision,
    Rollout,
    RolloutState,
    Strategy,
    Weights,
    decide,
)
from control_plane.core.weights import InFlightPolicy, Placement, Source
from control_plane.shell.engine import EngineLost
from control_plane.shell.fleet import Fleet
from control_plane.shell.ports import Clock
from control_plane.shell.rollout_hands import Hands
from control_plane.shell.rollout_status import FleetStatus, status_of_fleet
from control_plane.shell.rollout_store import RolloutStore
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

RESUME_SECONDS = 1.5
"""So long after a restart clients come back with what they have; they look four times a second."""
MAX_LINKS = 16
"""Partial updates over one another that a worker which joins late can be brought through."""


InThread = Callable[[Callable[[Rollout], None], Rollout], Awaitable[None]]
"""Calls a function where it may wait for a disk."""


class RolloutConflict(Exception):
    """The last rollout is not in a state that allows what was asked."""

    def __init__(self, message: str, rollout: Rollout | None = None) -> None:
        super().__init__(message)
        self.rollout = rollout


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator asks for; see the contract's WeightsRollout."""

    name: str
    source: Source
    is_partial: bool = False
    strategy: Strategy = Strategy.ROLLING
    policy: InFlightPolicy = InFlightPolicy.FINISH_ON_OLD
    placement: Placement = Placement.AUTO
    expected_digest: str = ""
    canary: Canary | None = None


class Rollouts:
    """The rollout of now, and the task that drives it.

    `first_source`: where workers can probably read the weights that they were started with; they
    check the digest. Writing down is done `in_thread`. Raises StoreUnusable.
    """

    def __init__(
        self,
        fleet: Fleet,
        store: RolloutStore,
        *,
        clock: Clock,
        new_id: Callable[[], str],
        first_source: Source | None = None,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._in_thread = in_thread
        self._fleet = fleet
        self._store = store
        self._clock = clock
        self._new_id = new_id
        self._first_source = first_source
        self._woken = asyncio.Event()
        self._lock = asyncio.Lock()
        self._hands = Hands(lambda: fleet.replicas, clock, self._woken.set)
        self._served: tuple[Weights, ...] = ()
        self._news = asyncio.Event()
        self._arriving: set[Path] = set()
        self.rollout = last = store.load()
        """The last one; None when there was none."""
        self._awaits_resumed = (
            last is not None
            and not last.state.is_over
            and last.policy is InFlightPolicy.FINISH_ON_OLD
        )
        """Of an earlier life of this server there may be answers that are to end as they began."""
        self._no_commit_until = float("-inf")
        store.prune(self.rollout, ())
        fleet.weights.watcher = self._woken.set
        if self.rollout is not None:
            self._serve(Decision(self.rollout))
        self.status: FleetStatus = self.look()
        """As it was when something changed last."""

    # --- what operators ask -------------------------------------------------------------------

    def check_free(self) -> None:
        """Raises what `begin` would now."""
        self._base()

    @contextmanager
    def arriving(self) -> Iterator[Path]:
        """Where streamed weights may be written; no file is there. At the end it goes, unless a
        rollout needs it by then."""
        path = self._store.new_spool(self._new_id())
        self._arriving.add(path)
        try:
            yield path
        finally:
            self._arriving.discard(path)
            self._store.prune(self.rollout, self._arriving)

    async def begin(self, order: Order) -> Rollout:
        """Begins a rollout; it is written down when this returns. Raises RolloutConflict, or
        EngineLost where nobody can say what serves now."""
        async with self._lock:
            before = self._base()
            base = _shortened(before) if order.is_partial else None
            target = Weights(order.name, order.expected_digest, order.source, base)
            return await self._take(
                Rollout(
                    self._new_id(),
                    target,
                    before,
                    order.strategy,
                    order.policy,
                    order.placement,
                    order.canary,
                )
            )

    async def rollback(self) -> Rollout:
        """Begins the way back to the weights before. Raises RolloutConflict."""
        async with self._lock:
            last = self.rollout
            if last is None:
                raise RolloutConflict("there was no rollout that could be turned back")
            match last.state:
                case RolloutState.RUNNING:
                    return await self._take(last.turned_back("an operator turned it back"))
                case RolloutState.DONE | RolloutState.FAILED:
                    back = replace(
                        last,
                        rollout_id=self._new_id(),
                        target=last.before,
                        before=last.target,
                        canary=None,
                        state=RolloutState.RUNNING,
                        commits=False,
                        is_proven=False,
                        reason="",
                    )
                    return await self._take(back)
                case RolloutState.ROLLING_BACK | RolloutState.ROLLED_BACK:
                    raise RolloutConflict(f"the rollout is {last.state.value} already", last)

    async def abort(self, rollout_id: str = "") -> Rollout:
        """Turns the rollout that runs back. Raises RolloutConflict."""
        async with self._lock:
            last = self.rollout
            if last is None or last.state is not RolloutState.RUNNING:
                raise RolloutConflict("no rollout runs", last)
            if rollout_id not in ("", last.rollout_id):
                raise RolloutConflict("another rollout runs", last)
            return await self._take(last.turned_back("an operator aborted it"))

    def look(self) -> FleetStatus:
        """How all stands now."""
        return status_of_fleet(self.rollout, self._fleet, self._hands.views())

    def tell(self) -> None:
        """Has whoever waits for a change look again."""
        status = self.look()
        if status != self.status:
            self.status = status
            self._news.set()
            self._news = asyncio.Event()

    async def changed(self, seen: FleetStatus) -> FleetStatus:
        """How all stands, once that is not as it was `seen`."""
        while self.status == seen:
            await self._news.wait()
        return self.status

    # --- the task -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Goes on for ever. Raises what is a bug of ours."""
        try:
            while True:
                self._woken.clear()
                seconds = await self._reconcile()
                self.tell()
                try:
                    async with asyncio.timeout(seconds):
                        await self._woken.wait()
                except TimeoutError:
                    pass
        finally:
            await self._hands.stop()

    async def _reconcile(self) -> float | None:
        """One look. Returns after how many seconds to look again, if nothing changes before."""
        if self._hands.bug is not None:
            raise self._hands.bug
        async with self._lock:
            if self.rollout is None:
                return None
            views = self._hands.views()
            if self._awaits_resumed and any(view.is_attached for view in views):
                self._awaits_resumed = False
                self._no_commit_until = self._clock() + RESUME_SECONDS
            decision = decide(self.rollout, views)
            if decision.rollout != self.rollout:
                await self._take(decision.rollout, wakes=False)
                self._woken.set()
            self._serve(decision)
            waits = max(0.0, self._no_commit_until - self._clock())
            for action in decision.actions:
                if not waits or not isinstance(action, Commit):
                    self._hands.do(action)
            if not waits:
                return decision.look_again
            return waits if decision.look_again is None else min(waits, decision.look_again)

    async def _take(self, rollout: Rollout, *, wakes: bool = True) -> Rollout:
        """Writes it down, and goes by it from then on."""
        await self._in_thread(self._store.save, rollout)
        last, self.rollout = self.rollout, rollout
        if last is None or last.rollout_id != rollout.rollout_id:
            self._hands.forget()
            self._store.prune(rollout, self._arriving)
        if last is None or (last.rollout_id, last.state) != (rollout.rollout_id, rollout.state):
            _logger.info(
                "rollout",
                extra=fields(
                    rollout_id=rollout.rollout_id,
                    state=rollout.state.value,
                    weights_name=rollout.target.name,
                    reason=rollout.reason,
                ),
            )
        if wakes:
            self.tell()
            self._woken.set()
        return rollout

    def _serve(self, decision: Decision) -> None:
        served = decision.served
        if served == self._served:
            return
        self._served = served
        policy = decision.rollout.policy
        continues = policy in (InFlightPolicy.CONTINUE_ON_NEW, InFlightPolicy.KEEP_KV)
        known = (decision.rollout.before, decision.rollout.target)
        self._fleet.weights.served.serve(
            [each.digest for each in served],
            continues=continues,
            names={each.digest: each.name for each in known if each.digest and each.name},
        )

    def _base(self) -> Weights:
        """What serves now, on which the next rollout builds."""
        last = self.rollout
        if last is not None:
            if not last.state.is_over:
                raise RolloutConflict("another rollout runs", last)
            return last.before if last.state is RolloutState.FAILED else last.goal
        digests = {view.digest for view in self._hands.views() if view.is_attached}
        if len(digests) != 1 or "" in digests:
            raise EngineLost("no worker is attached that says what serves now")
        return Weights(digest=digests.pop(), source=self._first_source)


def _shortened(weights: Weights, links: int = MAX_LINKS) -> Weights:
    """The weights, with no more partial updates below them than are gone through again."""
    if weights.base is None:
        return weights
    if links <= 1:
        return replace(weights, source=None, base=None)
    return replace(weights, base=_shortened(weights.base, links - 1))

"""The weights of a fleet, as far as clients notice: which answer, and whether it is paused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from control_plane.core.weights import InFlightPolicy
from control_plane.shell.engine import EnginePaused
from control_plane.shell.ports import WorkerLost
from control_plane.shell.replica import Replica
from control_plane.shell.served_weights import ServedWeights


class FleetWeights:
    """`replicas` gives those that are there. `on_change` is called when readiness may have changed.

    What a replica exchanges is its own: see Replica.weights.
    """

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], on_change: Callable[[], None]
    ) -> None:
        self._replicas = replicas
        self._on_change = on_change
        self.served = ServedWeights(self._decided)
        self._change_count = 0
        """Pauses and their ends."""
        self.refuses = False
        """Requests that come are refused while it is paused."""
        self.watcher: Callable[[], None] = lambda: None
        """Called when a replica has come, gone, or exchanged its weights."""

    def check_admits(self) -> None:
        """Raises EnginePaused."""
        if self.refuses:
            raise EnginePaused("an operator has paused the server")

    async def pause(
        self, policy: InFlightPolicy = InFlightPolicy.KEEP_KV, *, refuses: bool = False
    ) -> None:
        """No replica plans a further step until `resume`, those that join meanwhile neither.

        Requests that come are queued or, if it `refuses` them, refused. Returns once nothing is in
        flight; for `policy` see ReplicaWeights.pause. Idempotent.
        """
        self.refuses = refuses
        self._change_count += 1
        own = self._change_count
        self.served.is_paused |= policy is not InFlightPolicy.FINISH_ON_OLD
        pauses = [replica.weights.pause(policy) for replica in self._replicas()]
        outcomes = await asyncio.gather(*pauses, return_exceptions=True)
        if own != self._change_count:
            return  # it goes on, or pauses otherwise, by now
        self.served.is_paused = True
        for outcome in outcomes:
            # A worker that is lost is paused when it is back.
            if isinstance(outcome, BaseException) and not isinstance(outcome, WorkerLost):
                raise outcome

    def resume(self) -> None:
        """Goes on. Idempotent."""
        self._change_count += 1
        self.served.is_paused = self.refuses = False
        for replica in self._replicas():
            replica.weights.resume()

    def _decided(self) -> None:
        for replica in self._replicas():
            replica.weights.look()
        self._on_change()

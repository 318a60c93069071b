"""The clients' engine over all replicas: which request runs where, and where its tokens go.

Admission, placement, readiness and drain are decided here. register.py knows what runs, roster.py
which replicas there are, and moves.py moves sequences between them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count

from control_plane.core.claim import Jitter
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import FinishReason
from control_plane.core.fleet import MemberState, places
from control_plane.core.placement import Leads
from control_plane.core.request import Request, RequestId, SequenceId
from control_plane.shell.engine import (
    CannotResume,
    DuplicateRequest,
    EngineDraining,
    EngineError,
    EngineLost,
    ServedModel,
)
from control_plane.shell.fleet_weights import FleetWeights
from control_plane.shell.moves import Mover
from control_plane.shell.ports import Clock, Metrics, Worker, WorkerInfo
from control_plane.shell.register import SequenceRegister
from control_plane.shell.replica import Replica, ReplicaSettings
from control_plane.shell.roster import Roster
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import ArithmeticChange
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = 1.0
"""How long a drain waits for a lost worker: a broken connection is whole again by then, a new life
of the worker is not to be expected while everything stops."""
_LOOK_SECONDS = 0.1


class Fleet:
    """Implements shell.engine.Engine and shell.replica.ReplicaListener.

    `run` is one task, owned by the composition root; everything else returns at once and runs on
    the same loop. However `run` ends, every stream has ended with it. `on_readiness` is told each
    change of `ready`.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: ReplicaSettings,
        *,
        clock: Clock,
        jitter: Jitter,
        metrics: Metrics,
        on_readiness: Callable[[bool], None],
        served_model_name: str | None = None,
    ) -> None:
        self._settings = settings
        self._jitter = jitter
        self._clock = clock
        self._metrics = metrics
        self._on_readiness = on_readiness
        self._served_model_name = served_model_name
        self._accepting = True
        self._was_ready = False
        self._sequence_ids = map(SequenceId, count(1))
        self.register = SequenceRegister(clock, metrics)
        self._leads = Leads()
        self._reserved_count = 0
        """Places of requests that are on their way."""
        self.weights = FleetWeights(lambda: self.replicas, self._tell_readiness)
        self.roster = Roster(self._tell_readiness, metrics, self.weights.served)
        may_cross = settings.arithmetic_change is ArithmeticChange.CONTINUE
        self._mover = Mover(self.roster, self.register, metrics, clock, may_cross=may_cross)
        for worker in workers:
            self.join(worker)

    # --- the client edge ----------------------------------------------------------------------

    def served_model(self) -> ServedModel | None:
        """The model that answers; a worker lost only shortly ago still counts.

        Its length is what the longest replica holds: whoever needs it goes there.
        """
        attached_first = sorted(self.replicas, key=lambda replica: not replica.attached)
        models = [m for replica in attached_first if (m := replica.model()) is not None]
        if not models:
            return None
        return replace(
            models[0],
            name=self._served_model_name or models[0].name,
            max_sequence_token_count=max(model.max_sequence_token_count for model in models),
            vocabulary_size=min(model.vocabulary_size for model in models),
        )

    def check_room(self) -> None:
        """See Engine."""
        if not self._accepting:
            raise EngineDraining("the server is shutting down")
        self.weights.check_admits()
        cores = [member.core for member in self.roster.members() if member.takes_new]
        if cores and sum(core.room for core in cores) <= self._reserved_count:
            seconds = min(core.retry_after(self._clock()) for core in cores)
            raise QueueFull("as many requests run and wait as may", seconds)

    def reserve(self) -> Callable[[], None]:
        """See Engine."""
        self.check_room()
        self._reserved_count += 1

        def give_back() -> None:
            self._reserved_count -= 1

        return give_back

    def submit(self, request: Request, stream: TokenStream) -> None:
        """Queues a request. Raises QueueFull, RequestTooLong or an EngineError."""
        if not self._accepting:
            raise EngineDraining("the server is shutting down")
        self.weights.check_admits()
        if request.request_id in self.register.requests:
            if not self.register.goes_on(request):
                raise DuplicateRequest(f"request {request.request_id!r} is not finished")
            self.finish(request.request_id, FinishReason.CANCELLED)
        sequence_id = next(self._sequence_ids)
        replica = self._place(sequence_id, request, stream)
        self.register.add(sequence_id, request, replica, stream)

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """Ends a request, and frees what it holds; False if it is not running."""
        return self.register.finish(request_id, reason)

    @property
    def ready(self) -> bool:
        """Whether a worker is attached that does not leave, and new requests are accepted."""
        return self._accepting and any(
            replica.attached and replica.model() is not None for replica in self.replicas
        )

    # --- the composition root -----------------------------------------------------------------

    def join(self, worker: Worker, address: str = "") -> Replica:
        """Adds a replica for a worker. It runs as long as the fleet does, or until it leaves.

        `address` says to people where the worker is.
        """
        return self.roster.add(
            lambda number: Replica(
                number,
                worker,
                self._settings,
                address=address,
                clock=self._clock,
                jitter=self._jitter,
                metrics=self._metrics,
                register=self.register,
                listener=self,
                served_weights=self.weights.served,
            )
        )

    def leave(self, replica: Replica) -> None:
        """A replica takes nothing more, and goes when its sequences have gone or ended."""
        replica.leave()
        self.evacuate(replica)
        self._tell_readiness()

    async def run(self) -> None:
        """Runs all replicas, until cancelled.

        Never returns by itself. Raises what is a bug of ours; all streams have failed then.
        """
        try:
            await self.roster.run()
        finally:
            why = EngineLost if self._accepting else EngineDraining
            self._accepting = False
            self._tell_readiness()
            self.register.fail_all(why, "the engine has stopped")
            self._mover.stop()

    async def drain(self, grace: float) -> None:
        """Accepts nothing more, gives what runs `grace` seconds, then fails the rest.

        What has lost its worker fails long before: nobody will execute it.
        """
        self._accepting = False
        self._tell_readiness()
        _logger.info("draining", extra=fields(request_count=len(self.register.requests)))
        try:
            async with asyncio.timeout(grace):
                while not self.register.empty.is_set():
                    self._fail_without_worker()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.register.empty.wait(), _LOOK_SECONDS)
        except TimeoutError:
            _logger.warning(
                "requests outlived the drain",
                extra=fields(request_count=len(self.register.requests)),
            )
            self.register.fail_all(EngineDraining, "the server has shut down")

    # --- what replicas tell -------------------------------------------------------------------

    def changed(self, replica: Replica) -> None:
        """A replica's worker was attached or lost.

        A worker that is known from another replica has come here from there.
        """
        if replica.attached:
            for other in self.roster.namesakes(replica):
                other.life.replaced(replica.number, is_attached=other.attached)
        self._mover.changed(replica)
        self._tell_readiness()

    def took_turn(self, replica: Replica) -> None:
        """A replica has taken results: who waits may go where a place is free."""
        self._mover.relieve(replica)

    def evacuate(self, replica: Replica) -> None:
        """See ReplicaListener."""
        self._mover.evacuate(replica)

    def has_others(self, replica: Replica) -> bool:
        """See ReplicaListener."""
        others = (other for other in self.replicas if other is not replica)
        return any(other.state is MemberState.ATTACHED for other in others)

    def admit(self, replica: Replica, info: WorkerInfo) -> None:
        """See ReplicaListener."""
        if (objection := self.roster.objection(replica, info)) is not None:
            raise objection
        replica.life.claiming = info.incarnation_id

    # --- registers ----------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """All of them, whether their workers are there or not."""
        return self.roster.replicas

    def _place(self, sequence_id: SequenceId, request: Request, stream: TokenStream) -> Replica:
        """Adds a sequence to the first replica, best first, that takes it."""
        refusal: Exception = EngineLost("no worker is attached")
        for attempt, member in enumerate(places(self.roster.members(), request, self._leads)):
            replica = self.roster.numbered(member.number)
            try:
                replica.add(sequence_id, request, stream.scanner)
            except (QueueFull, RequestTooLong, EngineError) as error:
                if attempt == 0 or isinstance(refusal, CannotResume):
                    refusal = error
            else:
                self._mover.placed(replica)
                return replica
        if isinstance(refusal, CannotResume) and not all(r.attached for r in self.replicas):
            raise EngineLost("no worker is attached that could go on with these tokens")
        raise refusal

    def _fail_without_worker(self) -> None:
        """Fails, in a drain, what waits for a worker that is lost."""
        count = self.register.fail_lost(
            _RECONNECT_SECONDS, EngineDraining, "the server shuts down and has no worker"
        )
        if count:
            _logger.warning("requests have no worker", extra=fields(request_count=count))

    def _tell_readiness(self) -> None:
        self.weights.watcher()
        ready = self.ready
        if ready is not self._was_ready:
            self._was_ready = ready
            self._on_readiness(ready)

"""The clients' engine over all replicas: which request runs where, and where its tokens go.

Admission, placement, readiness, drain, and the end of what can't go on are decided here. The fleet
has the only register of what runs: a request's sequences by its id, and each sequence's replica and
stream. A replica delivers by sequence id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

from control_plane.core.account import Account
from control_plane.core.claim import Jitter
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import Finish, FinishReason, SequenceOutput
from control_plane.core.placement import Load, order
from control_plane.core.request import Request, RequestId, SequenceId
from control_plane.core.tokens import Tokens
from control_plane.shell.engine import (
    DuplicateRequest,
    EngineDraining,
    EngineError,
    EngineLost,
    ServedModel,
)
from control_plane.shell.ports import Clock, Metrics, Worker
from control_plane.shell.replica import Replica, ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import FailureKind
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_RECONNECT_SECONDS = 1.0
"""How long a drain waits for a lost worker: a broken connection is whole again by then, a new life
of the worker is not to be expected while everything stops."""
_LOOK_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence that is not over."""

    request_id: RequestId
    replica: Replica
    stream: TokenStream
    arrival: float
    first_token_at: float | None = None
    last_token_at: float | None = None

    def account(self, finish: Finish, now: float) -> Account:
        """What it has cost. It ended at `now`."""
        started_at = now if finish.started_at is None else finish.started_at
        first_at = self.first_token_at
        return Account(
            reason=finish.reason,
            usage=finish.usage,
            queue_seconds=started_at - self.arrival,
            first_token_seconds=None if first_at is None else first_at - self.arrival,
            seconds=now - self.arrival,
        )


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
        assert workers, "a fleet without workers"
        self._clock = clock
        self._metrics = metrics
        self._on_readiness = on_readiness
        self._served_model_name = served_model_name
        self._accepting = True
        self._was_ready = False
        self._sequence_ids = map(SequenceId, count(1))
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._requests: dict[RequestId, list[SequenceId]] = {}
        """The sequences of each request that are not over; never an empty list."""
        self._reserved_count = 0
        """Places of requests that are on their way."""
        self._empty = asyncio.Event()
        self._empty.set()
        self.replicas = [
            Replica(
                number, worker, settings, clock=clock, jitter=jitter, metrics=metrics, listener=self
            )
            for number, worker in enumerate(workers)
        ]

    # --- the client edge ----------------------------------------------------------------------

    def served_model(self) -> ServedModel | None:
        """The model that answers; a worker lost only shortly ago still counts.

        Its length and its vocabulary are what every replica that answers has.
        """
        attached_first = sorted(self.replicas, key=lambda replica: not replica.attached)
        models = [m for replica in attached_first if (m := replica.model()) is not None]
        if not models:
            return None
        return replace(
            models[0],
            name=self._served_model_name or models[0].name,
            max_sequence_token_count=min(model.max_sequence_token_count for model in models),
            vocabulary_size=min(model.vocabulary_size for model in models),
        )

    def check_room(self) -> None:
        """See Engine."""
        if not self._accepting:
            raise EngineDraining("the server is shutting down")
        loads = self._loads()
        if loads and sum(load.room for load in loads) <= self._reserved_count:
            seconds = min(load.retry_after for load in loads)
            raise QueueFull("as many requests run and wait as may", seconds)

    def reserve(self) -> Callable[[], None]:
        """See Engine."""
        self.check_room()
        self._reserved_count += 1
        return self._give_back

    def submit(self, request: Request, stream: TokenStream) -> None:
        """Queues a request. Raises QueueFull, RequestTooLong or an EngineError."""
        if not self._accepting:
            raise EngineDraining("the server is shutting down")
        if request.request_id in self._requests:
            raise DuplicateRequest(f"request {request.request_id!r} is not finished")
        sequence_id = next(self._sequence_ids)
        replica = self._place(sequence_id, request, stream)
        self._sequences[sequence_id] = _Sequence(
            request.request_id, replica, stream, request.arrival
        )
        self._requests[request.request_id] = [sequence_id]
        self._empty.clear()

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """Ends a request, and frees what it holds; False if it is not running."""
        sequence_ids = list(self._requests.get(request_id, ()))
        for sequence_id in sequence_ids:
            sequence = self._sequences[sequence_id]
            finish = sequence.replica.finish(sequence_id, reason)
            sequence.stream.push(Tokens([]), finish)
            self._forget(sequence_id, finish, self._clock())
        return bool(sequence_ids)

    @property
    def ready(self) -> bool:
        """Whether a worker is attached and new requests are accepted."""
        return self._accepting and any(replica.attached for replica in self.replicas)

    # --- the composition root -----------------------------------------------------------------

    async def run(self) -> None:
        """Runs all replicas, until cancelled.

        Never returns by itself. Raises what is a bug of ours; all streams have failed then.
        """
        tasks = [asyncio.create_task(replica.run()) for replica in self.replicas]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            why = EngineLost if self._accepting else EngineDraining
            self._stop_accepting()
            self._fail(list(self._sequences), why, "the engine has stopped")
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def drain(self, grace: float) -> None:
        """Accepts nothing more, gives what runs `grace` seconds, then fails the rest.

        What has lost its worker fails long before: nobody will execute it.
        """
        self._stop_accepting()
        _logger.info("draining", extra=fields(request_count=len(self._requests)))
        try:
            async with asyncio.timeout(grace):
                while not self._empty.is_set():
                    self._fail_without_worker()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._empty.wait(), _LOOK_SECONDS)
        except TimeoutError:
            _logger.warning(
                "requests outlived the drain", extra=fields(request_count=len(self._requests))
            )
            self._fail(list(self._sequences), EngineDraining, "the server has shut down")

    # --- what replicas tell -------------------------------------------------------------------

    def deliver(self, outputs: list[SequenceOutput], now: float) -> None:
        """Hands each sequence's tokens, and its end if it is there, to its stream."""
        sequences = self._sequences
        for output in outputs:
            sequence = sequences[output.sequence_id]
            tokens = output.tokens
            token_count = len(tokens.ids)
            if token_count:
                last = sequence.last_token_at
                if last is None:
                    sequence.first_token_at = now
                    self._metrics.first_token(now - sequence.arrival)
                else:
                    self._metrics.token_gap((now - last) / token_count, token_count)
                sequence.last_token_at = now
            sequence.stream.push(tokens, output.finish)
            if output.finish is not None:
                self._forget(output.sequence_id, output.finish, now)

    def fail(
        self,
        replica: Replica,
        why: str,
        *,
        only: Collection[SequenceId] | None = None,
        kind: FailureKind = EngineLost,
    ) -> None:
        """Fails a replica's sequences, or some of them."""
        failing = [
            sequence_id
            for sequence_id, sequence in self._sequences.items()
            if sequence.replica is replica and (only is None or sequence_id in only)
        ]
        self._fail(failing, kind, why)

    def changed(self, replica: Replica) -> None:
        """A replica's worker was attached or lost."""
        self._tell_readiness()

    # --- registers ----------------------------------------------------------------------------

    def _loads(self) -> list[Load]:
        """Of the replicas that can take sequences."""
        return [load for replica in self.replicas if (load := replica.load()) is not None]

    def _give_back(self) -> None:
        self._reserved_count -= 1

    def _place(self, sequence_id: SequenceId, request: Request, stream: TokenStream) -> Replica:
        """Adds a sequence to the first replica, in order of load, that takes it."""
        loads = self._loads()
        refusal: Exception = EngineLost("no worker is attached")
        for place, number in enumerate(order(loads)):
            try:
                self.replicas[number].add(sequence_id, request, stream.scanner)
            except (QueueFull, RequestTooLong, EngineError) as error:
                if place == 0:
                    refusal = error
            else:
                return self.replicas[number]
        raise refusal

    def _fail(self, sequence_ids: Iterable[SequenceId], kind: FailureKind, message: str) -> None:
        for sequence_id in sequence_ids:
            sequence = self._sequences[sequence_id]
            sequence.stream.fail(kind(message))
            finish = sequence.replica.finish(sequence_id, FinishReason.FAULT)
            self._forget(sequence_id, finish, self._clock())

    def _fail_without_worker(self) -> None:
        """Fails, in a drain, what waits for a worker that is lost."""
        failing = [
            sequence_id
            for sequence_id, sequence in self._sequences.items()
            if sequence.replica.lost_seconds >= _RECONNECT_SECONDS
        ]
        if failing:
            _logger.warning("requests have no worker", extra=fields(request_count=len(failing)))
            self._fail(failing, EngineDraining, "the server shuts down and has no worker")

    def _forget(self, sequence_id: SequenceId, finish: Finish, now: float) -> None:
        """A sequence is over: says what it has cost, to its stream and to the metrics."""
        sequence = self._sequences.pop(sequence_id)
        sequence.stream.account = account = sequence.account(finish, now)
        self._metrics.sequence_ended(account)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence_id)
        if not siblings:
            del self._requests[sequence.request_id]
        if not self._requests:
            self._empty.set()

    def _stop_accepting(self) -> None:
        self._accepting = False
        self._tell_readiness()

    def _tell_readiness(self) -> None:
        ready = self.ready
        if ready is not self._was_ready:
            self._was_ready = ready
            self._on_readiness(ready)

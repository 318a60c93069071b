"""What runs: each request's sequences, and each sequence's replica and stream.

The only register of it. Replicas deliver by sequence id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass

from control_plane.core.account import Account
from control_plane.core.events import Finish, FinishReason, SequenceOutput
from control_plane.core.request import Origin, Request, RequestId, SequenceId
from control_plane.core.tokens import Tokens
from control_plane.shell.engine import EngineLost
from control_plane.shell.ports import Clock, Metrics
from control_plane.shell.replica import Replica
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import FailureKind


@dataclass(slots=True, eq=False)
class _Sequence:
    """A sequence that is not over."""

    request_id: RequestId
    replica: Replica
    stream: TokenStream
    arrival: float
    seed: int
    origin: Origin | None = None
    """What the tokens of its stream are made with, as far as that was told."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    paused_at: float | None = None
    """Since when it has no worker, though it has run; until its next token."""

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


class SequenceRegister:
    """Implements shell.replica.Register.

    `empty` is set while nothing runs. `requests` has the sequences of each request that are not
    over, never an empty list.
    """

    def __init__(self, clock: Clock, metrics: Metrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._sequences: dict[SequenceId, _Sequence] = {}
        self.requests: dict[RequestId, list[SequenceId]] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def add(
        self, sequence_id: SequenceId, request: Request, replica: Replica, stream: TokenStream
    ) -> None:
        """A request of one sequence runs."""
        self._sequences[sequence_id] = _Sequence(
            request.request_id, replica, stream, request.arrival, request.seed
        )
        self.requests[request.request_id] = [sequence_id]
        self.empty.clear()

    def goes_on(self, request: Request) -> bool:
        """Whether it resumes the request of its id that runs: its client is back before anybody
        noticed that it was gone. Only that client was told the seed.
        """
        return request.resumed is not None and all(
            self._sequences[sequence_id].seed == request.seed
            for sequence_id in self.requests[request.request_id]
        )

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """Ends a request, and frees what it holds; False if it is not running."""
        sequence_ids = list(self.requests.get(request_id, ()))
        for sequence_id in sequence_ids:
            sequence = self._sequences[sequence_id]
            finish = sequence.replica.finish(sequence_id, reason)
            sequence.stream.push(Tokens([]), finish)
            self._forget(sequence_id, finish, self._clock())
        return bool(sequence_ids)

    def moved(self, sequence_id: SequenceId, target: Replica) -> None:
        """A sequence is at another replica now."""
        self._sequences[sequence_id].replica = target

    def pause(self, sequence_ids: Iterable[SequenceId], now: float) -> None:
        """These ran, and have no worker since `now`."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.get(sequence_id)
            if sequence is not None and sequence.paused_at is None:
                sequence.paused_at = now

    def deliver(self, outputs: list[SequenceOutput], now: float) -> None:
        """Hands each sequence's tokens, and its end if it is there, to its stream."""
        sequences = self._sequences
        kept: Container[SequenceId] = ()
        if outputs:  # all of one replica
            kept = sequences[outputs[0].sequence_id].replica.serving.kept
        for output in outputs:
            sequence = sequences[output.sequence_id]
            tokens = output.tokens
            token_count = len(tokens.ids)
            if token_count:
                origin = sequence.replica.serving.origin
                if output.finish is not None:
                    if output.finish.spans and output.finish.spans[-1].kv_of_other_weights:
                        origin = sequence.replica.serving.kept_origin
                elif kept and output.sequence_id in kept:
                    origin = sequence.replica.serving.kept_origin
                if sequence.origin is not origin and origin is not None:
                    sequence.origin = origin
                    sequence.stream.made_with(origin)
                last = sequence.last_token_at
                if last is None:
                    sequence.first_token_at = now
                    self._metrics.first_token(now - sequence.arrival)
                else:
                    self._metrics.token_gap((now - last) / token_count, token_count)
                sequence.last_token_at = now
                if sequence.paused_at is not None:
                    self._metrics.sequence_resumed(now - sequence.paused_at)
                    sequence.paused_at = None
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
        self.fail_some(failing, kind, why)

    def fail_all(self, kind: FailureKind, message: str) -> None:
        """Fails whatever runs."""
        self.fail_some(list(self._sequences), kind, message)

    def fail_lost(self, seconds: float, kind: FailureKind, message: str) -> int:
        """Fails what waits for a worker that has been lost for so long. Returns how many."""
        failing = [
            sequence_id
            for sequence_id, sequence in self._sequences.items()
            if sequence.replica.lost_seconds >= seconds
        ]
        self.fail_some(failing, kind, message)
        return len(failing)

    def fail_some(
        self, sequence_ids: Iterable[SequenceId], kind: FailureKind, message: str
    ) -> None:
        """Fails these sequences."""
        for sequence_id in sequence_ids:
            sequence = self._sequences[sequence_id]
            sequence.stream.fail(kind(message))
            finish = sequence.replica.finish(sequence_id, FinishReason.FAULT)
            self._forget(sequence_id, finish, self._clock())

    def _forget(self, sequence_id: SequenceId, finish: Finish, now: float) -> None:
        """A sequence is over: says what it has cost, to its stream and to the metrics."""
        sequence = self._sequences.pop(sequence_id)
        sequence.stream.account = account = sequence.account(finish, now)
        self._metrics.sequence_ended(account)
        siblings = self.requests[sequence.request_id]
        siblings.remove(sequence_id)
        if not siblings:
            del self.requests[sequence.request_id]
        if not self.requests:
            self.empty.set()

"""The streams of the requests that run: each ends exactly once, with a finish or an error."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from control_plane.core.events import Finish, SequenceOutput
from control_plane.core.request import Request, RequestId, SequenceId
from control_plane.observability.metrics import Telemetry
from control_plane.shell.stream import TokenStream


@dataclass(slots=True, eq=False)
class _Live:
    request_id: RequestId
    sequence_id: SequenceId
    stream: TokenStream
    arrival: float
    last_token_at: float | None = None


class LiveRequests:
    """Request ids to streams, and the latencies between the tokens they get."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._live: dict[RequestId, _Live] = {}
        self._by_sequence: dict[SequenceId, _Live] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def ids(self, *, mid_stream_only: bool = False) -> list[RequestId]:
        """The requests that run; only those that already have tokens, if asked."""
        return [
            request_id
            for request_id, live in self._live.items()
            if live.last_token_at is not None or not mid_stream_only
        ]

    async def wait_empty(self) -> None:
        """Returns once nothing runs."""
        await self._empty.wait()

    def sequence_id(self, request_id: RequestId) -> SequenceId:
        """What the core calls the request's sequence."""
        return self._live[request_id].sequence_id

    def add(self, request: Request, sequence_id: SequenceId, stream: TokenStream) -> None:
        """A request was queued."""
        live = _Live(request.request_id, sequence_id, stream, request.arrival)
        self._live[request.request_id] = self._by_sequence[sequence_id] = live
        self._empty.clear()

    def push(self, output: SequenceOutput, now: float) -> None:
        """Hands tokens, and the end if it is there, to the stream."""
        live = self._by_sequence[output.sequence_id]
        token_ids = output.tokens.ids
        count = len(token_ids)
        if count:
            if live.last_token_at is None:
                self._telemetry.first_token(now - live.arrival)
            else:
                self._telemetry.token_gap((now - live.last_token_at) / count, count)
            live.last_token_at = now
        live.stream.push(token_ids, output.finish)
        if output.finish is not None:
            self._remove(live)

    def end(self, request_id: RequestId, finish: Finish) -> None:
        """The request is over without new tokens."""
        live = self._live[request_id]
        live.stream.push([], finish)
        self._remove(live)

    def fail(self, request_id: RequestId, error: Exception) -> None:
        """The request ends with an error."""
        live = self._live[request_id]
        live.stream.fail(error)
        self._remove(live)

    def _remove(self, live: _Live) -> None:
        del self._live[live.request_id]
        del self._by_sequence[live.sequence_id]
        if not self._live:
            self._empty.set()

"""One line for each request at its end: what it was, what it cost, how long it took, how it ended.

Never its text. The line is made once the call is over, so nothing of it is paid for by a token. A
servicer notes what it knows of its request in a Generation, which belongs to the call's context.

A request that got tokens always has its line: a device has worked for it. The rest, refusals above
all, can be sent by anybody at any pace: so many lines a second, and then their number.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

from control_plane.core.account import Account
from control_plane.core.events import FinishReason
from control_plane.rpc.door import GENERATING
from control_plane.shell.stream import TokenStream
from twinplane.grpc.interceptors import REQUEST_ID, CallEnd
from twinplane.process.line_quota import LineQuota
from twinplane.process.logs import Field, fields

LINES_WITHOUT_TOKENS = 20
"""In a second, at most."""

_DIGITS = 6

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Generation:
    """What is known of a call's request so far. `model` is the served one's name.

    `resumed_token_count`: the tokens that a request brought which goes on behind a broken stream.
    """

    model: str = ""
    prompt_token_count: int | None = None
    resumed_token_count: int | None = None
    stream: TokenStream | None = None

    @property
    def account(self) -> Account | None:
        """What it has cost, once it is over; None for a request that never came to the engine."""
        return None if self.stream is None else self.stream.account


_GENERATION: ContextVar[Generation | None] = ContextVar("generation", default=None)


def begin_generation() -> Generation:
    """What the call in whose context this is may fill in."""
    generation = Generation()
    _GENERATION.set(generation)
    return generation


class RequestLog:
    """Writes the lines. Used on the event loop."""

    def __init__(self) -> None:
        self._quota = LineQuota(LINES_WITHOUT_TOKENS, _tell_left_out)

    def call_ended(self, end: CallEnd) -> None:
        """A call is over. To be called in its context."""
        if end.method not in GENERATING:
            if _logger.isEnabledFor(logging.DEBUG):
                _logger.debug("call ended", extra=fields(**_outcome(end, None)))
            return
        generation = _GENERATION.get() or Generation()
        account = generation.account
        brought = generation.resumed_token_count or 0  # nobody has worked for those here
        has_tokens = account is not None and account.usage.completion_tokens > brought
        if (has_tokens or self._quota.take()) and _logger.isEnabledFor(logging.INFO):
            _logger.info("request finished", extra=fields(**_line(end, generation)))

    def close(self) -> None:
        """Nothing follows: tells what was left out."""
        self._quota.end_second()


def _tell_left_out(count: int) -> None:
    _logger.info("requests without tokens finished, too many to tell", extra=fields(count=count))


def _line(end: CallEnd, generation: Generation) -> dict[str, Field]:
    """The fields: what isn't known of a request that was refused early is left out."""
    account = generation.account
    known: dict[str, Field] = {
        "request_id": REQUEST_ID.get() or None,
        "model": generation.model or None,
        "prompt_tokens": generation.prompt_token_count,
        "resumed_tokens": generation.resumed_token_count,
    }
    if account is not None:
        known["cached_tokens"] = account.usage.cached_prompt_tokens
        known["output_tokens"] = account.usage.completion_tokens
        known["queue_seconds"] = round(account.queue_seconds, _DIGITS)
        if account.first_token_seconds is not None:
            known["first_token_seconds"] = round(account.first_token_seconds, _DIGITS)
    known |= _outcome(end, account)
    return {name: value for name, value in known.items() if value is not None}


def _outcome(end: CallEnd, account: Account | None) -> dict[str, Field]:
    """`reason` is the error's, or how the text ended, or `cancelled`."""
    reason = end.reason
    if not reason and end.code == "OK" and account is not None:
        reason = account.reason.value
    elif not reason and end.code == "CANCELLED":
        reason = FinishReason.CANCELLED.value
    return {
        "method": end.method.rpartition("/")[2],
        "code": end.code,
        "reason": reason or None,
        "duration_seconds": round(end.seconds, _DIGITS),
    }

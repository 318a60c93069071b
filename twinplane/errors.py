"""What a client can meet. Nothing of gRPC is in here. The tree:

TwinplaneError
├── InvalidRequest      the request can never succeed as it is: `violations` name the fields
├── ModelNotFound       no model of this name is served
├── Overloaded          too much is asked for: try again after `retry_after` seconds
├── Unavailable         the server can't be reached, starts, or drains
├── WeightsChanged      the weights were exchanged, and the generation was not to go on: ask again
├── DeadlineExceeded    the time the caller allowed has passed
├── Cancelled           the call was cancelled, here or by the server
├── WrongServer         what answers at the address is no control plane, or lacks the RPC
├── InvalidAddress      the address is not one; also a ValueError
├── ClientUnusable      the client was closed, or belongs to another event loop or process
└── InternalError       a bug: the server's, or a server that does not keep the contract
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Violation:
    """One wrong field: its path in the request message, e.g. sampling.top_p, and what is wrong."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class PartialGeneration:
    """What had come of a generation when it broke. `seed` is the one of its draws: the same request
    with it gives the same tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    seed: int
    request_id: str
    model: str


class TwinplaneError(Exception):
    """Base of all. `reason` and `metadata` are the server's ErrorInfo, empty when it sent none: the
    reason is a name of twinplane.common.v1.ErrorReason without the prefix, e.g. QUEUE_FULL.

    `retry_after` is how many seconds the server asks to wait before another attempt; None when it
    does not say. `partial` is what had come of a generation that broke; None where none had begun.
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        violations: tuple[Violation, ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        self.violations = violations
        self.partial: PartialGeneration | None = None


class InvalidRequest(TwinplaneError):
    """The request is wrong, in any state of the server. `violations` say where."""


class ModelNotFound(TwinplaneError):
    """No model of this name is served."""


class Overloaded(TwinplaneError):
    """The server has no room for the request. Without `retry_after`, waiting does not help."""


class Unavailable(TwinplaneError):
    """No server answers, or it answers that it does not serve now."""


class WeightsChanged(TwinplaneError):
    """The server's weights were exchanged, and its operator chose to end what the old ones had
    begun. The same request is answered by the new ones."""


class DeadlineExceeded(TwinplaneError):
    """The call took longer than its timeout."""


class Cancelled(TwinplaneError):
    """The call was cancelled."""


class WrongServer(TwinplaneError):
    """What answers is no control plane, or one that lacks the RPC. The message says what it is."""


class InvalidAddress(TwinplaneError, ValueError):
    """An address can't be connected to as it is written."""


class ClientUnusable(TwinplaneError):
    """A client was used after it was closed, or outside the event loop or process it belongs to."""


class InternalError(TwinplaneError):
    """The server failed, or broke the contract."""

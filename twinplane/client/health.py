"""Whether a server takes work, by grpc.health.v1, and how to wait until it does.

The two messages of a health check have one field each, and the same bytes as two of protobuf's own:
so the client needs no package of health's messages.
"""

from __future__ import annotations

from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from twinplane.client.endpoint import Endpoint
from twinplane.client.failures import SERVICE
from twinplane.client.retry import Attempts
from twinplane.client.values import Health
from twinplane.errors import DeadlineExceeded, TwinplaneError, Unavailable

CHECK = "/grpc.health.v1.Health/Check"
serialize = StringValue.SerializeToString
"""Of HealthCheckRequest, whose field 1 is the name of a service."""
parse = Int32Value.FromString
"""Of HealthCheckResponse, whose field 1 is a state."""

_SERVING = 1
_LOOK_SECONDS = 5.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 1.0


def question() -> StringValue:
    """The request that asks for the clients' service."""
    return StringValue(value=SERVICE)


def health_of(answer: Int32Value) -> Health:
    """What was answered."""
    return Health.SERVING if answer.value == _SERVING else Health.NOT_SERVING


class ReadyWait:
    """Waiting until a server takes work: how long each look may take, and when to look again."""

    def __init__(self, endpoint: Endpoint, attempts: Attempts) -> None:
        self._endpoint = endpoint
        self._attempts = attempts
        self._pause = _FIRST_PAUSE
        self._cause = ""

    def look_seconds(self) -> float:
        """How long the next look may take."""
        remaining = self._attempts.remaining()
        return _LOOK_SECONDS if remaining is None else min(_LOOK_SECONDS, remaining)

    def pause_after(self, seen: TwinplaneError | None) -> float:
        """Seconds until the next look. `seen` is None where the server answered NOT_SERVING.

        Raises an error that waiting does not mend, and DeadlineExceeded when the time is over.
        """
        if seen is not None and not isinstance(seen, Unavailable | DeadlineExceeded):
            raise seen
        if seen is None:
            self._cause = "it has no worker yet, or shuts down"
        elif isinstance(seen, Unavailable) or not self._cause:  # the last look may be cut short
            self._cause = str(seen)
        remaining = self._attempts.remaining()
        if remaining is not None and remaining <= self._pause:
            after = f"{self._attempts.timeout:g} s"
            raise DeadlineExceeded(
                f"{self._endpoint.address} was not ready after {after}: {self._cause}"
            ) from seen
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return pause

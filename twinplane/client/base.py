"""What both clients are made with: where they connect, and how patient they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from twinplane.client import arguments
from twinplane.client.arguments import Metadata
from twinplane.client.endpoint import Endpoint, checked_address
from twinplane.client.failures import Failures
from twinplane.client.retry import Attempts, RetryPolicy
from twinplane.client.values import TlsCredentials
from twinplane.errors import ClientUnusable


class BaseClient:
    """The settings of a client, and whether it was closed. A subclass connects.

    Raises InvalidAddress, NoHomeFolder, TypeError or ValueError for settings that can't be used.
    """

    def __init__(
        self,
        address: str,
        credentials: TlsCredentials | None,
        metadata: Mapping[str, str | bytes] | None,
        timeout: float | None,
        retry: RetryPolicy | None,
        clock: Callable[[], float],
        jitter: Callable[[], float] | None,
    ) -> None:
        if not isinstance(credentials, TlsCredentials | None):
            raise arguments.wrong_type("credentials", "TlsCredentials", credentials)
        if not isinstance(retry, RetryPolicy | None):
            raise arguments.wrong_type("retry", "a RetryPolicy", retry)
        self._endpoint = Endpoint(checked_address(address), credentials is not None)
        self._credentials = credentials
        self._given_metadata = metadata
        self._timeout = arguments.seconds("timeout", timeout)
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._jitter = jitter or random.Random().random
        self._failures = Failures(self._endpoint)
        self._metadata()

    def _attempts(self, timeout: float | None) -> Attempts:
        bound = self._timeout if timeout is None else arguments.seconds("timeout", timeout)
        return Attempts(self._retry, bound, self._clock, self._jitter)

    def _metadata(self) -> Metadata:
        """What goes with a call, as the mapping is now."""
        return arguments.metadata(self._given_metadata)

    def _require_open(self) -> None:
        """Raises ClientUnusable once the client is closed."""
        if self._failures.client_closed:
            raise ClientUnusable("the client was closed: make another one")

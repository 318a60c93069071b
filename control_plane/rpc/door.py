"""Who comes in: decided before a request is looked at, so that a refusal costs next to nothing.

A call that generates passes when there is a place for its request, and keeps the place until the
request is submitted. A request whose text waits to be tokenized is held whole, so what such
requests have in bytes is bounded too, of every call.
"""

from __future__ import annotations

from collections.abc import Callable

from control_plane.rpc.errors import RequestsTooLarge
from control_plane.shell.engine import Engine
from twinplane.inference.v1 import inference_pb2

MAX_HELD_BYTES = 64 * 1024 * 1024

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
GENERATING = frozenset(
    f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name[name].name}"
    for name in ("Generate", "Complete")
)
"""The RPCs that generate, as gRPC names them."""


class EngineDoor:
    """Implements twinplane.grpc.interceptors.Door for the clients' service."""

    def __init__(self, engine: Engine, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._engine = engine
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The messages of all calls that are inside."""
        return self._held_bytes

    def check(self, method: str) -> None:
        """See Door. Raises what Engine.check_room raises."""
        if method in GENERATING:
            self._engine.check_room()

    def enter(self, method: str, byte_count: int) -> Callable[[], None]:
        """See Door. Raises RequestsTooLarge, or what Engine.reserve raises."""
        # One alone always passes, whatever the bound.
        if self._held_bytes and self._held_bytes + byte_count > self._max_held_bytes:
            raise RequestsTooLarge(self._held_bytes)
        give_back = self._engine.reserve() if method in GENERATING else None
        self._held_bytes += byte_count

        def leave() -> None:
            self._held_bytes -= byte_count
            if give_back is not None:
                give_back()

        return leave

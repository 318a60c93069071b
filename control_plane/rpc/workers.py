"""From the address of a worker, as the setting gives it, to the Worker port.

Addresses separated by commas are the ranks of one replica, in any order: HOST:1,HOST:2.
"""

from __future__ import annotations

import secrets

from control_plane.core.plan import Message
from control_plane.rpc import convert
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.ports import (
    RankCoordinates,
    Worker,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.rank_group import RankGroupWorker
from twinplane.worker.v1 import model_runner_pb2

_SOON_SECONDS = 2.0


def worker_at(addresses: str, *, controller_id: str) -> Worker:
    """The worker at an address, or the rank group at several."""
    each = addresses.split(",")
    if len(each) == 1:
        return GrpcWorker(addresses, controller_id=controller_id)
    encode = _EncodedOnce()
    ranks = [GrpcWorker(one, controller_id=controller_id, encode=encode) for one in each]
    return RankGroupWorker(ranks, new_key=lambda: secrets.token_hex(16))


async def place_at(address: str, *, controller_id: str) -> RankCoordinates | None:
    """The place among ranks that the worker at an address tells; None: it does not answer soon."""
    worker = GrpcWorker(address, controller_id=controller_id, attach_timeout=_SOON_SECONDS)
    try:
        return (await worker.look()).ranks
    except (WorkerLost, WorkerRefused, WorkerUnusable):
        return None  # whoever claims it says why
    finally:
        await worker.detach()


class _EncodedOnce:
    """Encodes a message for the first rank that sends it; the others send the same object."""

    def __init__(self) -> None:
        self._last: tuple[Message, model_runner_pb2.ExecuteRequest] | None = None

    def __call__(self, message: Message) -> model_runner_pb2.ExecuteRequest:
        if self._last is None or self._last[0] is not message:
            self._last = message, convert.message_to_pb(message)
        return self._last[1]

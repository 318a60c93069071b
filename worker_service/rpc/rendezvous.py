"""Where a claim lets the ranks of a replica meet, and whether that fits the claimed worker."""

from __future__ import annotations

import re

from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.rendezvous import Rendezvous

_DEFAULT_SECONDS = 10.0
_MAX_SECONDS = 600.0
_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\[\]:]+)):(?P<port>[0-9]{1,5})")


def rendezvous_from_pb(
    request: model_runner_pb2.AttachRequest, ranks: RankCoordinates
) -> Rendezvous | None:
    """The rendezvous of a claim; None for a worker that executes plans alone.

    Raises PlanInvalid where it is missing, is no place to meet, or is of another replica.
    """
    if not request.HasField("rendezvous"):
        if ranks.size > 1:
            raise PlanInvalid(
                "rendezvous", f"missing: this worker executes plans as one of {ranks.size} ranks"
            )
        return None
    if ranks.size == 1:
        raise PlanInvalid("rendezvous", "must not be set: this worker executes plans alone")
    given = request.rendezvous
    for name, size, own in (
        ("tensor_size", given.tensor_size, ranks.tensor[1]),
        ("pipeline_size", given.pipeline_size, ranks.pipeline[1]),
    ):
        if size != own:
            raise PlanInvalid(f"rendezvous.{name}", f"is {size}, and this worker's is {own}")
    host, port = _host_and_port(given.address)
    if not _KEY.fullmatch(given.key):
        raise PlanInvalid(
            "rendezvous.key", "must be 1 to 128 of the characters A-Z, a-z, 0-9 and -_.:"
        )
    seconds = _DEFAULT_SECONDS
    if given.HasField("timeout"):
        seconds = given.timeout.seconds + given.timeout.nanos / 1e9
    if not 0 < seconds <= _MAX_SECONDS:
        raise PlanInvalid("rendezvous.timeout", f"must be above 0 s, and {_MAX_SECONDS:g} at most")
    return Rendezvous(request.epoch, host, port, given.key, seconds)


def _host_and_port(address: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(address)
    port = int(match["port"]) if match else 0
    if match is None or not 0 < port <= 65535:
        raise PlanInvalid("rendezvous.address", "must be host:port")
    return match["v6"] or match["host"], port

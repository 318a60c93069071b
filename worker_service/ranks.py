"""Which rank a worker is. Resolved once, at startup; needs no torch.

A setting says it (`--rank`), or the place where the worker runs:

- LeaderWorkerSet sets LWS_WORKER_INDEX and LWS_GROUP_SIZE in each pod: a group is a replica, and a
  pod is a rank.
- The pods of a StatefulSet are called NAME-0, NAME-1 and so on: as many in a row as a replica has
  ranks are one replica.

A worker that executes plans alone asks neither for its rank. A setting wins over both, and
LeaderWorkerSet over the ordinal. What contradicts is an error: of two ranks that think they are the
same, or of a group of another size, nobody could tell later why they do not meet.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from twinplane.settings.worker import WorkerConfig
from worker_service.domain.capability import RankCoordinates

_INDEX, _SIZE = "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"
_LEADER = "LWS_LEADER_ADDRESS"
_IN_KUBERNETES = "KUBERNETES_SERVICE_HOST"
_ORDINAL = re.compile(r".*-(\d{1,6})")


class RanksInvalid(ValueError):
    """Nobody can tell which rank this worker is; the message says what contradicts."""


def resolve_ranks(
    config: WorkerConfig, environ: Mapping[str, str], host_name: str
) -> RankCoordinates:
    """The worker's place. Raises RanksInvalid.

    `host_name` is the machine's, in Kubernetes that of the pod.
    """
    count = config.tensor_parallel_size * config.pipeline_parallel_size
    rank, replica = config.rank, config.data_parallel_rank
    _require_below("rank", rank, count)
    _require_below("data_parallel_rank", replica, config.data_parallel_size)
    if count > 1 and _INDEX in environ:
        rank = _by_group(rank, count, environ)
    elif (ordinal := _ordinal(environ, host_name)) is not None and (
        count * config.data_parallel_size > 1
    ):
        rank, replica = _by_ordinal(config, ordinal, host_name)
    stage, tensor = divmod(rank or 0, config.tensor_parallel_size)
    return RankCoordinates(
        tensor=(tensor, config.tensor_parallel_size),
        pipeline=(stage, config.pipeline_parallel_size),
        data=(replica or 0, config.data_parallel_size),
    )


def rendezvous_host(config: WorkerConfig, environ: Mapping[str, str]) -> str:
    """The host at which other ranks reach this one; empty: as the controller reaches it."""
    host = config.rendezvous_host or environ.get(_LEADER, "")
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _by_group(rank: int | None, count: int, environ: Mapping[str, str]) -> int:
    """The rank in a group of LeaderWorkerSet's."""
    index, size = _number(_INDEX, environ), _number(_SIZE, environ)
    if rank is not None:
        if size == count and index != rank:
            raise RanksInvalid(
                f"rank is {rank}, but {_INDEX} is {index} in a group of {size}: leave --rank away"
            )
        return rank
    if size != count:
        raise RanksInvalid(
            f"{_SIZE} is {size}, but tensor-parallel size times pipeline-parallel size is {count}: "
            "make them equal, or give each worker of a pod its --rank"
        )
    if index >= size:
        raise RanksInvalid(f"{_INDEX} is {index} in a group of {size}")
    return index


def _by_ordinal(config: WorkerConfig, ordinal: int, host_name: str) -> tuple[int, int]:
    """Rank and replica of a StatefulSet's pod."""
    count = config.tensor_parallel_size * config.pipeline_parallel_size
    replica, rank = divmod(ordinal, count)
    if config.rank is not None:
        return config.rank, config.data_parallel_rank or 0
    if replica >= config.data_parallel_size:
        raise RanksInvalid(
            f"the pod {host_name} would be rank {rank} of replica {replica}, and there are "
            f"{config.data_parallel_size} replicas of {count}: give --rank, or start fewer pods"
        )
    if config.data_parallel_rank not in (None, replica):
        raise RanksInvalid(
            f"data_parallel_rank is {config.data_parallel_rank}, but the pod {host_name} belongs "
            f"to replica {replica}, of {count} ranks each: leave --data-parallel-rank away, or "
            "give --rank, too"
        )
    return rank, replica


def _require_below(name: str, rank: int | None, count: int) -> None:
    if rank is not None and rank >= count:
        raise RanksInvalid(f"{name} is {rank}, and there are {count}: they count from 0")


def _ordinal(environ: Mapping[str, str], host_name: str) -> int | None:
    """That of a StatefulSet's pod; None elsewhere."""
    match = _ORDINAL.fullmatch(host_name.partition(".")[0])
    return int(match[1]) if match and _IN_KUBERNETES in environ else None


def _number(name: str, environ: Mapping[str, str]) -> int:
    text = environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise RanksInvalid(f"{name} is {text!r}, not a number")
    return int(text)

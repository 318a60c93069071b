"""Says of each worker whether it is there and how much room it has, for its operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from control_plane.core.fleet import MemberState
from control_plane.shell.replica import Replica


class WorkerState(Enum):
    """Whether a worker is there; the values are the contract's names in lower case."""

    ATTACHED = "attached"
    AWAY = "away"
    AWAITED = "awaited"
    """None has come yet."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A replica's worker as it is now; see the message of the same name for what each field means.

    `away_seconds` is 0 unless the worker is away.
    """

    state: WorkerState
    worker_id: str = ""
    device: str = ""
    away_seconds: float = 0.0
    kv_token_count: int = 0
    free_kv_token_count: int = 0
    max_sequence_count: int = 0
    running_sequence_count: int = 0
    waiting_sequence_count: int = 0
    replica: int = 0
    address: str = ""
    replica_state: MemberState = MemberState.JOINING
    reason: str = ""


def serving_worker(replica: Replica) -> ServingWorker:
    """The worker of a replica: the one that is attached, or the last one."""
    stats, serving = replica.stats(), replica.serving
    attachment, capacity = serving.attachment, serving.capacity
    if stats is None or attachment is None or capacity is None:
        return ServingWorker(
            WorkerState.AWAITED,
            replica=replica.number,
            address=replica.life.address,
            replica_state=replica.state,
            reason=replica.life.reason,
        )
    # The core leaves sequences in their rows until the next worker has come; they run nowhere.
    running = stats.running if replica.attached else 0
    return ServingWorker(
        state=WorkerState.ATTACHED if replica.attached else WorkerState.AWAY,
        worker_id=attachment.info.worker_id,
        device=attachment.info.device,
        away_seconds=replica.lost_seconds,
        kv_token_count=stats.kv_active_tokens + stats.kv_cached_tokens + stats.kv_free_tokens,
        free_kv_token_count=stats.kv_cached_tokens + stats.kv_free_tokens,
        max_sequence_count=capacity.max_sequence_count,
        running_sequence_count=running,
        waiting_sequence_count=stats.running + stats.waiting - running,
        replica=replica.number,
        address=replica.life.address,
        replica_state=replica.state,
        reason=replica.life.reason,
    )


def away_seconds(workers: Sequence[ServingWorker]) -> float:
    """For how long every worker that came has been away; 0 where one is here, or none ever came."""
    if any(worker.state is WorkerState.ATTACHED for worker in workers):
        return 0.0
    return min((worker.away_seconds for worker in workers if worker.away_seconds), default=0.0)

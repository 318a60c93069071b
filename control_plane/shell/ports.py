"""What the shell needs of the world, as protocols: workers, a clock, and whoever counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from control_plane.core.account import Account
from control_plane.core.events import Stats
from control_plane.core.fleet import MemberState
from control_plane.core.plan import Message, Row, StepResult, WeightVersion
from control_plane.core.weights import PreparedWeights, WeightsUpdate
from control_plane.shell.adapter_files import AdapterFiles

HELD_SAMPLING = "held_sampling"
"""The feature that a request with masks needs."""


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """A worker's place: (rank, size) of each kind of parallelism."""

    tensor: tuple[int, int] = (0, 1)
    pipeline: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)

    def __str__(self) -> str:
        return f"tensor rank {self.tensor[0]}, pipeline rank {self.pipeline[0]}"


@dataclass(frozen=True, slots=True)
class PreparedUpdate:
    """Weights that wait for their commit on a worker. `digest`: of the version that makes."""

    update_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the control plane uses of a worker's capability, all of it.

    `features` are the contract's names in lower case, those that this controller does not know
    too. `rank_count`: how many workers execute a plan together with this one, itself included; 1
    also for a rank group, which is all of them. `device` is for people. `arithmetic` names how
    results round; empty: the worker does not say. `rendezvous_address`: host:port at which this
    worker lets the other ranks meet; empty: not here. `prepared`: weights that wait for a commit;
    of a rank group, those that wait on all ranks. `weights_trouble`: how the ranks of a group
    differ in their weights, for people; the digest is empty then. `adapter_slot_count`: LoRA
    adapters that it holds at once.
    """

    worker_id: str
    incarnation_id: str
    epoch: int
    model_name: str
    vocabulary_size: int
    weight_version: WeightVersion
    max_sequence_count: int
    max_step_token_count: int
    max_sequence_token_count: int
    max_prompt_token_count: int
    max_inflight_step_count: int
    features: frozenset[str]
    rank_count: int
    device: str
    arithmetic: str = ""
    ranks: RankCoordinates = RankCoordinates()
    rendezvous_address: str = ""
    prepared: PreparedUpdate | None = None
    weights_trouble: str = ""
    adapter_slot_count: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """What the control plane uses of a worker's KV pool. `block_count` includes the null block."""

    block_count: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a claim has brought. `previous_epoch` is that of the claim before it, 0 for none."""

    info: WorkerInfo
    pool: MemoryPool
    previous_epoch: int

    def has_kv_of(self, earlier: Attachment) -> bool:
        """Whether the worker's KV is still what the claim `earlier` has made of it.

        True for the same life of the worker with the same weights and the same pool, when nobody
        has claimed it in between.
        """
        info, before = self.info, earlier.info
        return (
            self.previous_epoch == before.epoch
            and info.incarnation_id == before.incarnation_id
            and info.weight_version == before.weight_version
            and self.pool == earlier.pool
        )


class WorkerLost(Exception):
    """The worker can't be reached, or its stream broke: attach again and resync."""


class WorkerSilent(WorkerLost):
    """The connection looks whole, but the worker has given no sign of life for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no sign of life for {seconds:g} s")
        self.seconds = seconds


class WorkerHung(WorkerLost):
    """The worker's process may answer, but it has not finished a step after `seconds`, which is
    far more than such a step takes.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"a step is not finished after {seconds:.1f} s")
        self.seconds = seconds


class RefusalReason(StrEnum):
    """Why a worker refuses a message: the names that a worker uses of the contract's ErrorReason.

    UNKNOWN stands for every reason that this controller does not know, e.g. a newer worker's.
    """

    INVALID_PLAN = "INVALID_PLAN"
    STALE_EPOCH = "STALE_EPOCH"
    CONTRACT_VERSION_MISMATCH = "CONTRACT_VERSION_MISMATCH"
    WEIGHT_VERSION_MISMATCH = "WEIGHT_VERSION_MISMATCH"
    STEP_GAP = "STEP_GAP"
    STEP_RESULT_GONE = "STEP_RESULT_GONE"
    STEP_CONFLICT = "STEP_CONFLICT"
    ROW_NOT_HELD = "ROW_NOT_HELD"
    PLAN_MISMATCH = "PLAN_MISMATCH"
    WORKER_LOADING = "WORKER_LOADING"
    WORKER_DRAINING = "WORKER_DRAINING"
    GROUP_LOST = "GROUP_LOST"
    RUNNER_FAILED = "RUNNER_FAILED"
    INVALID_UPDATE = "INVALID_UPDATE"
    UPDATE_CONFLICT = "UPDATE_CONFLICT"
    SOURCE_LOST = "SOURCE_LOST"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    ADAPTER_IN_USE = "ADAPTER_IN_USE"
    ASLEEP = "ASLEEP"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def _missing_(cls, value: object) -> RefusalReason:
        return cls.UNKNOWN


class WorkerRefused(Exception):
    """The worker refused a message and said why.

    `step_id` is the refused message's, 0 when the worker did not say. `rows` are those of it that
    are to blame, as far as the worker can say.
    """

    def __init__(
        self, reason: RefusalReason, message: str, step_id: int = 0, rows: Sequence[int] = ()
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.step_id = step_id
        self.rows = tuple(map(Row, rows))


class WorkerUnusable(Exception):
    """The worker answers, but nothing can run on it: this controller's settings and the worker's
    limits leave no room, or it can't be claimed again.
    """


class WorkerElsewhere(WorkerUnusable):
    """The worker serves this controller already, as another replica."""


Admit = Callable[[WorkerInfo], None]
"""Looks at a worker before it is claimed. Raises WorkerUnusable where it must not be."""


class Worker(Protocol):
    """One worker, claimed by one replica. Every method raises WorkerLost or WorkerRefused, and
    `attach` may raise WorkerUnusable.
    """

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        """Claims the worker, by default one epoch above its current, and opens the pipeline.

        `admit` is asked before that; what it raises is raised, and nothing is claimed.
        """
        ...

    async def send(self, message: Message) -> None:
        """Puts a message into the pipeline; waits only when the transport is full."""
        ...

    async def receive(self) -> StepResult:
        """The result of the next message, in the order they were sent."""
        ...

    async def ping(self) -> None:
        """Returns once the worker's process has answered; may wait for ever."""
        ...

    async def detach(self) -> None:
        """Closes the pipeline. The worker keeps its claim; never raises."""
        ...


@runtime_checkable
class WeightsWorker(Protocol):
    """What a Worker does with weights beside its pipeline, under the claim that it has. Every
    method raises WorkerLost or WorkerRefused."""

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        """Reads and checks other weights while steps go on; may take minutes."""
        ...

    async def commit(self, update_id: str, digest: str) -> WeightVersion:
        """Makes prepared weights live, behind every message that was sent. Returns what plans are
        to expect from then on."""
        ...

    async def abort(self, update_id: str) -> None:
        """Drops what is prepared, or ends its preparation. Idempotent."""
        ...


@runtime_checkable
class AdaptersWorker(Protocol):
    """What a Worker with slots does with adapters beside its pipeline, under the claim that it has.
    Every method raises WorkerLost or WorkerRefused."""

    async def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Loads an adapter into a slot that no row uses, while steps go on."""
        ...

    async def list_adapters(self) -> dict[int, str]:
        """The digests of what the slots hold, by slot."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...


class ReplicaMetrics(Protocol):
    """What a replica reports. Every method only counts, and never raises."""

    def worker_attached(
        self, *, worker_id: str, model: str, device: str, resumed: bool, kv_kept: bool
    ) -> None:
        """A worker was claimed.

        `resumed`: work goes on from an earlier claim; `kv_kept`: with the KV of that claim.
        """
        ...

    def worker_lost(self, cause: str | None) -> None:
        """The claim is over; without a cause, because the worker was let go."""
        ...

    def step_planned(self, token_count: int) -> None:
        """A step is to compute so many tokens."""
        ...

    def step_finished(self, executed_seconds: float, control_seconds: float) -> None:
        """A step is over: how long the worker executed it, and the control plane worked on it."""
        ...

    def weights_exchanged(self, outcome: str, paused_seconds: float) -> None:
        """An exchange of weights is over: done, refused or lost. No step ran for so long."""
        ...


class MoveMetrics(Protocol):
    """What is reported of replicas and what moves between them. Every method only counts."""

    def sequence_moved(self, source: int, target: int, cause: str) -> None:
        """A sequence went from one replica to another, by their numbers."""
        ...

    def sequence_resumed(self, seconds: float) -> None:
        """A sequence that ran has its next token, so long after its worker was lost or left."""
        ...

    def replica_left(self, number: int) -> None:
        """A replica has left the fleet for good."""
        ...


class Metrics(MoveMetrics, Protocol):
    """What the shell reports. Every method only counts, and never raises."""

    def replica(
        self, number: int, stats: Callable[[], Stats | None], state: Callable[[], MemberState]
    ) -> ReplicaMetrics:
        """Where replica `number` reports to; `stats` and `state` are asked whenever somebody
        looks."""
        ...

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""
        ...

    def token_gap(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the token before them."""
        ...

    def sequence_ended(self, account: Account) -> None:
        """A sequence has ended, however."""
        ...

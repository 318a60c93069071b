"""Several workers as one: who stands where among them, and what they can do together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, TypeVar

from control_plane.core.plan import StepResult, WeightVersion
from control_plane.shell.ports import (
    Attachment,
    MemoryPool,
    Worker,
    WorkerInfo,
    WorkerUnusable,
)

T = TypeVar("T")

_MAX_TOLD = 8
"""Missing ranks that are named: a worker may say that there are any number."""


class RanksDiverged(WorkerUnusable):
    """The ranks of a replica have not applied the same."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a replica meet under one claim, and for how many seconds each waits."""

    address: str
    key: str
    tensor_size: int
    pipeline_size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """A rank that was claimed. `previous_epoch` is that of the claim before, 0 for none."""

    info: WorkerInfo
    previous_epoch: int


class Rank(Worker, Protocol):
    """A worker that executes plans with others: `attach` in three steps, between which all ranks
    wait for each other. Every method raises as Worker's do."""

    @property
    def address(self) -> str:
        """Where it listens, for people."""
        ...

    async def look(self) -> WorkerInfo:
        """What it is, and which epoch it has; connects."""
        ...

    async def claim(self, epoch: int, rendezvous: Rendezvous | None) -> Claimed:
        """Claims it. It then begins to meet the others."""
        ...

    async def join(self, seconds: float) -> MemoryPool:
        """Its pool, once it has met the others, for which it has so many seconds; opens the
        pipeline."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank that was looked at."""

    rank: Rank
    info: WorkerInfo

    @property
    def place(self) -> tuple[int, int]:
        """Pipeline and tensor rank: the order of ranks."""
        return self.info.ranks.pipeline[0], self.info.ranks.tensor[0]

    def __str__(self) -> str:
        return f"{self.rank.address} ({self.info.ranks})"


def seated(seats: Iterable[Seat]) -> list[Seat]:
    """The ranks of a replica in their order: pipeline stages, and within each the tensor ranks.

    Raises WorkerUnusable, with the addresses, unless each place is taken once and all serve the
    same model. Their weights may differ: see WorkerInfo.weights_trouble.
    """
    seats = list(seats)
    for seat in seats:
        if seat.info.rank_count == 1 and len(seats) > 1:
            others = ", ".join(other.rank.address for other in seats if other is not seat)
            raise WorkerUnusable(
                f"{seat.rank.address} executes plans alone and is listed as a rank beside "
                f"{others}: start it with its --tensor-parallel-size and "
                "--pipeline-parallel-size, or list it as a worker of its own"
            )
    _require_equal(seats, "parallel sizes", _sizes)
    _require_equal(seats, "data-parallel ranks", lambda info: info.ranks.data[0])
    by_place: dict[tuple[int, int], Seat] = {}
    for seat in seats:
        taken = by_place.setdefault(seat.place, seat)
        if taken is not seat:
            raise WorkerUnusable(
                f"{taken.rank.address} and {seat.rank.address} are both {seat.info.ranks}: each "
                "rank of a replica has a place of its own, see --rank"
            )
    tensor_size, pipeline_size = seats[0].info.ranks.tensor[1], seats[0].info.ranks.pipeline[1]
    absent = (
        f"tensor rank {tensor}, pipeline rank {stage}"
        for stage in range(pipeline_size)
        for tensor in range(tensor_size)
        if (stage, tensor) not in by_place
    )
    missing = list(islice(absent, _MAX_TOLD))
    if missing:
        there = ", ".join(map(str, seats))
        raise WorkerUnusable(
            f"the replica has {tensor_size * pipeline_size} ranks and nobody is "
            f"{' or '.join(missing)}; there are {there}"
        )
    _require_equal(seats, "vocabularies", lambda info: info.vocabulary_size)
    return [by_place[place] for place in sorted(by_place)]


def answering(seats: Sequence[Seat]) -> int:
    """The index, in the order of ranks, of the one that answers with tokens: the first of the last
    pipeline stage."""
    return len(seats) - seats[0].info.ranks.tensor[1]


def merged(
    seats: Sequence[Seat], claims: Sequence[Claimed], pools: Sequence[MemoryPool]
) -> Attachment:
    """What the ranks of a claim, in their order, can do together: the least of each limit.

    Raises WorkerUnusable where their blocks differ in size.
    """
    claimed = [Seat(seat.rank, claim.info) for seat, claim in zip(seats, claims, strict=True)]
    sizes = [pool.block_size for pool in pools]
    if len(set(sizes)) > 1:
        raise WorkerUnusable(_differing("block sizes", seats, sizes))
    previous = {claim.previous_epoch for claim in claims}
    pool = MemoryPool(min(pool.block_count for pool in pools), sizes[0])
    # Only where every rank was left by the same claim, the KV of all is that claim's.
    return Attachment(together(claimed), pool, previous.pop() if len(previous) == 1 else 0)


def together(seats: Sequence[Seat]) -> WorkerInfo:
    """What ranks in their order are as one worker."""
    infos = [seat.info for seat in seats]
    first = infos[0]
    version, trouble = first.weight_version, ""
    if len({info.weight_version.digest for info in infos}) > 1:
        digests = [info.weight_version.digest[:12] for info in infos]
        version, trouble = WeightVersion(0, ""), _differing("weights", seats, digests)
    prepared = {info.prepared for info in infos}
    device = first.device if len(infos) == 1 else f"{first.device} x{len(infos)}"
    return replace(
        first,
        worker_id=",".join(info.worker_id for info in infos),
        incarnation_id=",".join(info.incarnation_id for info in infos),
        max_sequence_count=min(info.max_sequence_count for info in infos),
        max_step_token_count=min(info.max_step_token_count for info in infos),
        max_sequence_token_count=min(info.max_sequence_token_count for info in infos),
        max_prompt_token_count=min(info.max_prompt_token_count for info in infos),
        max_inflight_step_count=min(info.max_inflight_step_count for info in infos),
        adapter_slot_count=min(info.adapter_slot_count for info in infos),
        features=frozenset.intersection(*(info.features for info in infos)),
        rank_count=1,
        device=device,
        arithmetic="; ".join(dict.fromkeys(info.arithmetic for info in infos)),
        weight_version=version,
        weights_trouble=trouble,
        prepared=prepared.pop() if len(prepared) == 1 else None,
    )


def agreed(seats: Sequence[Seat], results: Sequence[StepResult], answer: int) -> StepResult:
    """The result of the rank that answers, once all have applied the same. Raises RanksDiverged."""
    wanted = results[answer]
    for seat, result in zip(seats, results, strict=True):
        if (result.epoch, result.step_id) != (wanted.epoch, wanted.step_id):
            raise RanksDiverged(
                f"{seat} answers for step {result.step_id} where {seats[answer]} answers for "
                f"step {wanted.step_id}"
            )
        if not result.digest or result.digest != wanted.digest:
            raise RanksDiverged(
                f"{seat} has applied something else than {seats[answer]} in step {wanted.step_id}"
            )
    # A replica ends with the first of its ranks.
    return replace(wanted, is_leaving=any(result.is_leaving for result in results))


def _sizes(info: WorkerInfo) -> str:
    return f"{info.ranks.tensor[1]} tensor x {info.ranks.pipeline[1]} pipeline ranks"


def _require_equal(seats: Sequence[Seat], what: str, of: Callable[[WorkerInfo], object]) -> None:
    """Raises WorkerUnusable where the ranks have different ones."""
    values = [of(seat.info) for seat in seats]
    if any(value != values[0] for value in values):
        raise WorkerUnusable(_differing(what, seats, values))


def _differing(what: str, seats: Sequence[Seat], values: Sequence[object]) -> str:
    each = ", ".join(
        f"{seat.rank.address} has {value}" for seat, value in zip(seats, values, strict=True)
    )
    return f"the ranks of a replica have different {what}: {each}"

"""Other weights for all ranks of a replica: on all of them, or the claim is over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from control_plane.core.plan import WeightVersion
from control_plane.core.weights import (
    DistributedSource,
    Placement,
    PreparedWeights,
    WeightsUpdate,
)
from control_plane.shell.ports import (
    AdaptersWorker,
    RefusalReason,
    WeightsWorker,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.ranks import RanksDiverged, Seat


def update_of(update: WeightsUpdate, index: int) -> WeightsUpdate:
    """What a rank is to prepare, by its place in the order of ranks."""
    source = update.source
    if isinstance(source, DistributedSource):
        source = replace(source, first_rank=source.first_rank + index)
    return replace(update, source=source)


def prepared_by_all(seats: Sequence[Seat], each: Sequence[PreparedWeights]) -> PreparedWeights:
    """What ranks have prepared, as that of one worker. Raises WorkerRefused where it differs."""
    if len({prepared.digest for prepared in each}) > 1:
        told = ", ".join(
            f"{seat.rank.address} has {prepared.digest[:12]}"
            for seat, prepared in zip(seats, each, strict=True)
        )
        raise WorkerRefused(
            RefusalReason.INVALID_UPDATE, f"the ranks have prepared different weights: {told}"
        )
    in_place = any(prepared.placement is Placement.IN_PLACE for prepared in each)
    return replace(
        each[0],
        placement=Placement.IN_PLACE if in_place else Placement.BESIDE,
        device_bytes=sum(prepared.device_bytes for prepared in each),
        host_bytes=sum(prepared.host_bytes for prepared in each),
    )


async def commit_on_all(seats: Sequence[Seat], update_id: str, digest: str) -> list[WeightVersion]:
    """Commits on every rank. Raises a rank's WorkerRefused where no rank has committed, or may
    have; else what ends the claim: RanksDiverged or WorkerLost."""
    outcomes = await asyncio.gather(
        *(port_of(seat).commit(update_id, digest) for seat in seats), return_exceptions=True
    )
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return [outcome for outcome in outcomes if isinstance(outcome, WeightVersion)]
    for error in errors:
        if not isinstance(error, WorkerLost | WorkerRefused | WorkerUnusable):
            raise error
    if len(errors) == len(seats) and all(isinstance(error, WorkerRefused) for error in errors):
        raise errors[0]
    told = "; ".join(
        f"{seat.rank.address}: {outcome}"
        for seat, outcome in zip(seats, outcomes, strict=True)
        if isinstance(outcome, BaseException)
    )
    raise RanksDiverged(f"not every rank has exchanged its weights: {told}")


def lagging(seats: Sequence[Seat]) -> tuple[str, str, list[Seat]] | None:
    """The update and digest that some ranks have, and the others prepared; and these others."""
    for leader in seats:
        digest = leader.info.weight_version.digest
        others = [seat for seat in seats if seat.info.weight_version.digest != digest]
        prepared = {seat.info.prepared for seat in others}
        update = prepared.pop() if len(prepared) == 1 else None
        if update is not None and update.digest == digest:
            return update.update_id, digest, others
    return None


def adapters_port_of(seat: Seat) -> AdaptersWorker:
    """The rank, which takes adapters. Raises WorkerRefused."""
    if not isinstance(seat.rank, AdaptersWorker):
        raise WorkerRefused(RefusalReason.UNKNOWN, f"{seat.rank.address} takes no adapters")
    return cast(AdaptersWorker, seat.rank)


def port_of(seat: Seat) -> WeightsWorker:
    """The rank, which takes updates. Raises WorkerRefused."""
    if not isinstance(seat.rank, WeightsWorker):
        raise WorkerRefused(RefusalReason.UNKNOWN, f"{seat.rank.address} takes no updates")
    return cast(WeightsWorker, seat.rank)

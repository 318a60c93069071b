"""The Worker port over the ranks of one replica.

Every rank is claimed under one epoch and gets the same plans. A step is over when all ranks have
acknowledged it with equal digests; the first rank of the last pipeline stage has its tokens. The
loss of any rank, or a difference, ends the claim: the replica claims all of them again and resyncs,
as after the loss of a single worker.

Ranks are claimed in their order. Who does not get the first one leaves the others alone, so that
two controllers never hold a part each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from control_plane.core.plan import Message, StepPlan, StepResult, WeightVersion
from control_plane.core.weights import PreparedWeights, WeightsUpdate
from control_plane.shell.adapter_files import AdapterFiles
from control_plane.shell.ports import (
    Admit,
    Attachment,
    RefusalReason,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.rank_weights import (
    adapters_port_of,
    commit_on_all,
    lagging,
    port_of,
    prepared_by_all,
    update_of,
)
from control_plane.shell.ranks import (
    Claimed,
    Rank,
    Rendezvous,
    Seat,
    agreed,
    answering,
    merged,
    seated,
    together,
)

T = TypeVar("T")

_JOIN_SECONDS = 10.0
_OTHER_CAUSE_SECONDS = 0.5
"""How long a rank that misses another one waits for that one's end to be heard of."""
_WorkerError = WorkerLost | WorkerRefused | WorkerUnusable


class RankGroupWorker:
    """Implements shell.ports.Worker over several ranks.

    `new_key` names a meeting of the ranks: another name each time it is called. `join_seconds`: how
    long each rank waits for the others.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        *,
        new_key: Callable[[], str],
        join_seconds: float = _JOIN_SECONDS,
    ) -> None:
        assert len(ranks) > 1, "one worker is no group"
        self._ranks = ranks
        self._new_key = new_key
        self._join_seconds = join_seconds
        self._last_epoch = 0
        self._seats: list[Seat] = []
        """In their order while they are claimed."""
        self._answering = 0
        self._versions: list[WeightVersion] = []
        """Of the weights of each."""

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        """Claims every rank under one epoch, by default one above every epoch seen, and returns
        once they have met.

        Raises WorkerUnusable also where the workers are not the ranks of one replica.
        """
        await self.detach()
        infos = await self._of_all(self._ranks, [rank.look() for rank in self._ranks])
        seats = seated(map(Seat, self._ranks, infos))
        ranks = [seat.rank for seat in seats]
        if admit is not None:
            admit(together(seats))
        if epoch is None:
            epoch = max(self._last_epoch, *(info.epoch for info in infos)) + 1
        self._last_epoch = max(self._last_epoch, epoch)
        place = seats[0].info.ranks
        rendezvous = Rendezvous(
            address=seats[0].info.rendezvous_address,
            key=self._new_key(),
            tensor_size=place.tensor[1],
            pipeline_size=place.pipeline[1],
            seconds=self._join_seconds,
        )
        claims = await self._of_all(ranks[:1], [ranks[0].claim(epoch, rendezvous)])
        claims += await self._of_all(
            ranks[1:], [rank.claim(epoch, rendezvous) for rank in ranks[1:]]
        )
        pools = await self._of_all(ranks, [rank.join(self._join_seconds) for rank in ranks])
        self._seats, self._answering = seats, answering(seats)
        claims = await self._caught_up(claims)
        self._versions = [claim.info.weight_version for claim in claims]
        return merged(seats, claims, pools)

    async def _caught_up(self, claims: list[Claimed]) -> list[Claimed]:
        """The last claim may have ended while weights were exchanged on some ranks only. The
        others exchange theirs now, if they still have them prepared."""
        seats = [Seat(seat.rank, c.info) for seat, c in zip(self._seats, claims, strict=True)]
        found = lagging(seats)
        if found is None:
            return claims
        update_id, digest, late = found
        versions = await self._of_all(
            [seat.rank for seat in late], [port_of(seat).commit(update_id, digest) for seat in late]
        )
        by_rank = {id(seat.rank): version for seat, version in zip(late, versions, strict=True)}
        return [
            replace(claim, info=replace(claim.info, weight_version=version, prepared=None))
            if (version := by_rank.get(id(seat.rank))) is not None
            else claim
            for seat, claim in zip(seats, claims, strict=True)
        ]

    async def send(self, message: Message) -> None:
        """Sends every rank the message. Generations count what each has been through."""
        ranks = self._claimed()
        versions = self._versions
        messages = [message] * len(ranks)
        if isinstance(message, StepPlan) and any(one != versions[0] for one in versions):
            messages = [replace(message, weight_version=version) for version in versions]
        sends = [rank.send(own) for rank, own in zip(ranks, messages, strict=True)]
        await self._of_all(ranks, sends)

    async def receive(self) -> StepResult:
        """The next result, when every rank has acknowledged it. Raises RanksDiverged."""
        ranks = self._claimed()
        results = await self._of_all(ranks, [rank.receive() for rank in ranks])
        return agreed(self._seats, results, self._answering)

    async def ping(self) -> None:
        """Returns once every rank's process has answered."""
        await self._of_all(self._ranks, [rank.ping() for rank in self._ranks])

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        """Prepares weights on every rank; on none, if one refuses them."""
        ranks = self._claimed()
        ports = [port_of(seat) for seat in self._seats]
        calls = [port.prepare(update_of(update, index)) for index, port in enumerate(ports)]
        try:
            return prepared_by_all(self._seats, await self._of_all(ranks, calls))
        except WorkerRefused:
            with suppress(WorkerLost, WorkerRefused):
                await self.abort(update.update_id)
            raise

    async def commit(self, update_id: str, digest: str) -> WeightVersion:
        """Commits on every rank. Raises RanksDiverged where not all have."""
        self._claimed()
        self._versions = await commit_on_all(self._seats, update_id, digest)
        return self._versions[0]

    async def abort(self, update_id: str) -> None:
        """Drops what every rank has prepared."""
        ranks = self._claimed()
        ports = [port_of(seat) for seat in self._seats]
        await self._of_all(ranks, [port.abort(update_id) for port in ports])

    async def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Loads an adapter on every rank."""
        ranks = self._claimed()
        calls = [adapters_port_of(seat).load_adapter(slot, files) for seat in self._seats]
        await self._of_all(ranks, calls)

    async def list_adapters(self) -> dict[int, str]:
        """What every rank holds in the same slot."""
        ranks = self._claimed()
        calls = [adapters_port_of(seat).list_adapters() for seat in self._seats]
        first, *others = await self._of_all(ranks, calls)
        return {
            slot: digest
            for slot, digest in first.items()
            if all(other.get(slot) == digest for other in others)
        }

    async def detach(self) -> None:
        """Closes all pipelines."""
        self._seats = []
        await asyncio.gather(*(rank.detach() for rank in self._ranks))

    def _claimed(self) -> list[Rank]:
        if not self._seats:
            raise WorkerLost("not attached")
        return [seat.rank for seat in self._seats]

    async def _of_all(self, ranks: Sequence[Rank], calls: Sequence[Awaitable[T]]) -> list[T]:
        """The outcomes of one call on each rank, at the same time; none is left running.

        Raises the error of one of them, with its address. Where a rank fails because it misses
        another, that other one's error is the one.
        """
        tasks: list[asyncio.Future[T]] = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if _only_follows(tasks):
                await asyncio.wait(
                    tasks, timeout=_OTHER_CAUSE_SECONDS, return_when=asyncio.ALL_COMPLETED
                )
            failed = sorted(
                (_weight(error), index)
                for index, task in enumerate(tasks)
                if (error := _error_of(task)) is not None
            )
            if failed:
                index = failed[0][1]
                error = tasks[index].exception()
                assert error is not None
                raise _with_address(error, ranks[index].address) from error
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                _error_of(task)  # asyncio reports errors that nobody has read


def _error_of(task: asyncio.Future[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None


def _only_follows(tasks: Sequence[asyncio.Future[Any]]) -> bool:
    """Whether tasks have failed, and none with a cause of its own."""
    errors = [error for task in tasks if (error := _error_of(task)) is not None]
    return bool(errors) and all(_weight(error) == 2 for error in errors)


def _weight(error: BaseException) -> int:
    """The order in which errors are told: bugs of ours, then causes, then what follows from
    them."""
    match error:
        case WorkerRefused(reason=RefusalReason.GROUP_LOST):
            return 2
        case WorkerLost() | WorkerRefused() | WorkerUnusable():
            return 1
        case _:
            return 0


def _with_address(error: BaseException, address: str) -> BaseException:
    """The error, of the same kind, with the rank's address in its text."""
    match error:
        case WorkerRefused(reason=reason, step_id=step_id, rows=rows):
            text = str(error).removeprefix(f"{reason}: ")
            return WorkerRefused(reason, f"rank {address}: {text}", step_id, rows)
        case WorkerUnusable() if address not in str(error):
            return WorkerUnusable(f"rank {address}: {error}")
        case WorkerLost() if address not in str(error):
            return WorkerLost(f"rank {address}: {error}")
        case _:
            return error

"""The ranks of a replica exchange their weights together, or the claim is over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from control_plane.core.plan import Message, ScheduledRows, StepPlan, StepResult, WeightVersion
from control_plane.core.weights import (
    DiskSource,
    DistributedSource,
    Placement,
    PreparedWeights,
    WeightsUpdate,
)
from control_plane.shell.ports import (
    Admit,
    MemoryPool,
    PreparedUpdate,
    RankCoordinates,
    RefusalReason,
    WorkerInfo,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.rank_group import RankGroupWorker
from control_plane.shell.ranks import Claimed, RanksDiverged, Rendezvous

OLD, NEW = "a" * 64, "b" * 64
UPDATE = WeightsUpdate("u", DiskSource("somewhere"))


@dataclass(eq=False)
class FakeRank:
    """One of `size` tensor ranks. `fails` says by what a call ends."""

    index: int
    size: int = 3
    version: WeightVersion = field(default_factory=lambda: WeightVersion(1, OLD))
    prepared: PreparedUpdate | None = None
    makes: str = NEW
    """The digest of what it prepares."""
    fails: dict[str, Exception] = field(default_factory=dict)
    updates: list[WeightsUpdate] = field(default_factory=list)
    sent: list[Message] = field(default_factory=list)
    epoch: int = 0

    @property
    def address(self) -> str:
        return f"rank-{self.index}:1"

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=f"rank-{self.index}",
            incarnation_id=f"rank-{self.index}.1",
            epoch=self.epoch,
            model_name="m",
            vocabulary_size=7,
            weight_version=self.version,
            max_sequence_count=4,
            max_step_token_count=16,
            max_sequence_token_count=32,
            max_prompt_token_count=32,
            max_inflight_step_count=2,
            features=frozenset(),
            rank_count=self.size,
            device="cpu",
            ranks=RankCoordinates((self.index, self.size)),
            rendezvous_address="h:1",
            prepared=self.prepared,
        )

    async def look(self) -> WorkerInfo:
        return self.info()

    async def claim(self, epoch: int, rendezvous: Rendezvous | None) -> Claimed:
        previous, self.epoch = self.epoch, epoch
        return Claimed(self.info(), previous)

    async def join(self, seconds: float) -> MemoryPool:
        return MemoryPool(10, 4)

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Any:
        raise AssertionError("a rank is not attached to alone")

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> StepResult:
        raise AssertionError("nobody asks")

    async def ping(self) -> None:
        """It lives."""

    async def detach(self) -> None:
        """Nothing is open."""

    def _fail(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        self._fail("prepare")
        self.updates.append(update)
        self.prepared = PreparedUpdate(update.update_id, self.makes)
        place = Placement.IN_PLACE if self.index == 1 else Placement.BESIDE
        return PreparedWeights(update.update_id, self.makes, place, 10, 1)

    async def commit(self, update_id: str, digest: str) -> WeightVersion:
        self._fail("commit")
        assert self.prepared == PreparedUpdate(update_id, digest)
        self.prepared = None
        self.version = WeightVersion(self.version.generation + 1, digest)
        return self.version

    async def abort(self, update_id: str) -> None:
        self._fail("abort")
        self.prepared = None


def ranks_of(count: int = 3) -> list[FakeRank]:
    return [FakeRank(index, count) for index in range(count)]


async def claimed(ranks: list[FakeRank]) -> RankGroupWorker:
    group = RankGroupWorker(ranks, new_key=lambda: "key")
    await group.attach()
    return group


def plan(version: WeightVersion) -> StepPlan:
    return StepPlan(1, 1, version, [], [], ScheduledRows())


REFUSED = WorkerRefused(RefusalReason.OUT_OF_MEMORY, "too large")


@pytest.mark.parametrize("count", [2, 3, 4])
async def test_all_of_them_prepare_and_commit(count: int) -> None:
    ranks = ranks_of(count)
    group = await claimed(ranks)
    prepared = await group.prepare(UPDATE)
    assert prepared == PreparedWeights("u", NEW, Placement.IN_PLACE, 10 * count, count)
    assert await group.commit("u", NEW) == WeightVersion(2, NEW)
    assert {rank.version for rank in ranks} == {WeightVersion(2, NEW)}


async def test_each_takes_a_rank_of_the_group_that_broadcasts() -> None:
    ranks = ranks_of()
    source = DistributedSource("h:1", 4, 1, 0, "gloo", "k", (), 0, 60.0)
    await (await claimed(ranks)).prepare(WeightsUpdate("u", source))
    taken = [rank.updates[0].source for rank in ranks]
    assert taken == [replace(source, first_rank=rank) for rank in (1, 2, 3)]


@pytest.mark.parametrize("which", range(3))
async def test_what_one_refuses_none_keeps(which: int) -> None:
    ranks = ranks_of()
    ranks[which].fails["prepare"] = REFUSED
    group = await claimed(ranks)
    with pytest.raises(WorkerRefused, match=f"rank-{which}") as refused:
        await group.prepare(UPDATE)
    assert refused.value.reason is RefusalReason.OUT_OF_MEMORY
    assert not any(rank.prepared for rank in ranks)


async def test_ranks_that_read_different_files_are_found_out() -> None:
    ranks = ranks_of()
    ranks[2].makes = "c" * 64
    group = await claimed(ranks)
    with pytest.raises(WorkerRefused, match="rank-2:1 has cccccccccccc"):
        await group.prepare(UPDATE)
    assert not any(rank.prepared for rank in ranks)


@pytest.mark.parametrize("error", [REFUSED, WorkerLost("gone")], ids=["refused", "lost"])
@pytest.mark.parametrize("which", range(3))
async def test_one_that_does_not_commit_ends_the_claim_and_catches_up_in_the_next(
    which: int, error: Exception
) -> None:
    ranks = ranks_of()
    group = await claimed(ranks)
    await group.prepare(UPDATE)
    ranks[which].fails["commit"] = error
    with pytest.raises(RanksDiverged, match=f"rank-{which}"):
        await group.commit("u", NEW)
    assert len({rank.version.digest for rank in ranks}) == 2
    ranks[which].fails.clear()
    attachment = await group.attach()
    assert attachment.info.weight_version.digest == NEW and not attachment.info.weights_trouble
    assert {rank.version for rank in ranks} == {WeightVersion(2, NEW)}


@pytest.mark.parametrize("count", [2, 4])
async def test_what_all_refuse_to_commit_is_a_refusal(count: int) -> None:
    ranks = ranks_of(count)
    group = await claimed(ranks)
    await group.prepare(UPDATE)
    for rank in ranks:
        rank.fails["commit"] = REFUSED
    with pytest.raises(WorkerRefused) as refused:
        await group.commit("u", NEW)
    assert refused.value.reason is RefusalReason.OUT_OF_MEMORY
    assert {rank.version.digest for rank in ranks} == {OLD}


@pytest.mark.parametrize("which", range(3))
async def test_one_that_comes_back_with_other_weights_is_told_and_mended(which: int) -> None:
    """It was restarted, and has nothing prepared."""
    ranks = ranks_of()
    for rank in ranks:
        rank.version = WeightVersion(5, NEW)
    ranks[which].version = WeightVersion(1, OLD)

    def objects(info: WorkerInfo) -> None:
        if info.weights_trouble:
            raise WorkerUnusable(info.weights_trouble)

    group = RankGroupWorker(ranks, new_key=lambda: "key")
    with pytest.raises(WorkerUnusable, match=f"rank-{which}:1 has aaaaaaaaaaaa"):
        await group.attach(admit=objects)
    info = (await group.attach()).info
    assert info.weight_version == WeightVersion(0, "") and f"rank-{which}" in info.weights_trouble
    await group.prepare(UPDATE)
    version = await group.commit("u", NEW)
    await group.send(plan(version))
    told = [rank.sent[0].weight_version for rank in ranks if isinstance(rank.sent[0], StepPlan)]
    assert told == [rank.version for rank in ranks], "each counts for itself"
    assert {rank.version.generation for rank in ranks} == {6, 2}


async def test_what_all_have_prepared_is_told_at_the_claim() -> None:
    ranks = ranks_of()
    for rank in ranks:
        rank.prepared = PreparedUpdate("u", NEW)
    group = await claimed(ranks)
    assert (await group.attach()).info.prepared == PreparedUpdate("u", NEW)
    ranks[1].prepared = None
    assert (await group.attach()).info.prepared is None
    await group.abort("u")
    assert not any(rank.prepared for rank in ranks)


async def test_nothing_is_done_without_a_claim() -> None:
    group = RankGroupWorker(ranks_of(), new_key=lambda: "key")
    for call in (group.prepare(UPDATE), group.commit("u", NEW), group.abort("u")):
        with pytest.raises(WorkerLost):
            await call

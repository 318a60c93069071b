"""Who stands where among the ranks of a replica, and what they can do together."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from control_plane.core.plan import Row, StepResult, WeightVersion
from control_plane.core.tokens import Tokens
from control_plane.shell.ports import MemoryPool, RankCoordinates, WorkerInfo, WorkerUnusable
from control_plane.shell.ranks import (
    Claimed,
    Rank,
    RanksDiverged,
    Seat,
    agreed,
    answering,
    merged,
    seated,
)

SIZES = [(tensor, pipeline) for tensor in (1, 2, 3, 4) for pipeline in (1, 2, 3, 4)][1:]


class At:
    """Stands for a rank of which only the address is asked."""

    def __init__(self, address: str) -> None:
        self.address = address


def info(tensor: int, stage: int, tensors: int, stages: int, **changes: Any) -> WorkerInfo:
    made = WorkerInfo(
        worker_id=f"w{stage}{tensor}",
        incarnation_id=f"life-{stage}{tensor}",
        epoch=3,
        model_name="m",
        vocabulary_size=100,
        weight_version=WeightVersion(1, "ab" * 32),
        max_sequence_count=8,
        max_step_token_count=64,
        max_sequence_token_count=128,
        max_prompt_token_count=128,
        max_inflight_step_count=4,
        features=frozenset({"a", "b"}),
        rank_count=tensors * stages,
        device="cpu:0",
        arithmetic="round",
        ranks=RankCoordinates((tensor, tensors), (stage, stages)),
    )
    return replace(made, **changes)


def seat(info: WorkerInfo) -> Seat:
    return Seat(cast("Rank", At(f"host-{info.worker_id}:1")), info)


def seats(tensors: int, stages: int, **changes: Any) -> list[Seat]:
    return [
        seat(info(tensor, stage, tensors, stages, **changes))
        for stage in range(stages)
        for tensor in range(tensors)
    ]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_come_in_any_order(sizes: tuple[int, int], seed: int) -> None:
    in_order = seats(*sizes)
    shuffled = random.Random(seed).sample(in_order, len(in_order))
    assert seated(shuffled) == in_order
    first_of_last = in_order[answering(in_order)].info.ranks
    assert (first_of_last.tensor[0], first_of_last.pipeline[0]) == (0, sizes[1] - 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_missing_rank_is_named(sizes: tuple[int, int], seed: int) -> None:
    all_seats = seats(*sizes)
    gone = all_seats.pop(random.Random(seed).randrange(len(all_seats)))
    if not all_seats:
        return
    with pytest.raises(WorkerUnusable) as raised:
        seated(all_seats)
    assert f"nobody is {gone.info.ranks}" in str(raised.value)
    assert all(each.rank.address in str(raised.value) for each in all_seats)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_a_doubled_rank_is_named_with_both_addresses(sizes: tuple[int, int], seed: int) -> None:
    all_seats = seats(*sizes)
    rng = random.Random(seed)
    one = rng.randrange(len(all_seats))
    twin = Seat(cast("Rank", At("twin:1")), all_seats[one].info)
    place = rng.randrange(len(all_seats))
    changed = [*all_seats[:place], twin, *all_seats[place:]]
    with pytest.raises(WorkerUnusable, match="are both tensor rank") as raised:
        seated(changed)
    assert "twin:1" in str(raised.value)
    assert all_seats[one].rank.address in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ranks": RankCoordinates((1, 4), (1, 1)), "rank_count": 4}, "parallel sizes"),
        ({"ranks": RankCoordinates((1, 2), (1, 3)), "rank_count": 6}, "parallel sizes"),
        ({"ranks": RankCoordinates((1, 2), (1, 2), (1, 2))}, "data-parallel ranks"),
        ({"vocabulary_size": 99}, "vocabularies"),
        ({"rank_count": 1}, "executes plans alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("which", range(4))
def test_what_differs_is_said_with_the_addresses(
    changes: dict[str, Any], why: str, which: int
) -> None:
    mixed = seats(2, 2)
    place = mixed[which].info.ranks
    changed = dict(changes)
    if isinstance(ranks := changed.get("ranks"), RankCoordinates):
        changed["ranks"] = replace(
            ranks,
            tensor=(place.tensor[0], ranks.tensor[1]),
            pipeline=(place.pipeline[0], ranks.pipeline[1]),
        )
    mixed[which] = seat(replace(mixed[which].info, **changed))
    with pytest.raises(WorkerUnusable, match=why) as raised:
        seated(mixed)
    assert mixed[which].rank.address in str(raised.value)


LIMITS = (
    "max_sequence_count",
    "max_step_token_count",
    "max_sequence_token_count",
    "max_prompt_token_count",
    "max_inflight_step_count",
)


@pytest.mark.parametrize("seed", range(50))
def test_together_they_can_do_the_least_of_each(seed: int) -> None:
    rng = random.Random(seed)
    sizes = rng.choice(SIZES)
    in_order = [
        seat(
            replace(
                each.info,
                features=frozenset(rng.sample("abcd", 3)),
                arithmetic=rng.choice(["round", "round", "other"]),
                **{limit: rng.randint(1, 9) for limit in LIMITS},
            )
        )
        for each in seats(*sizes)
    ]
    pools = [MemoryPool(rng.randint(5, 20), 16) for _ in in_order]
    previous = [rng.choice([2, 2, 2, 5]) for _ in in_order]
    claims = [Claimed(each.info, before) for each, before in zip(in_order, previous, strict=True)]
    attachment = merged(in_order, claims, pools)
    infos = [each.info for each in in_order]
    for limit in LIMITS:
        assert getattr(attachment.info, limit) == min(getattr(one, limit) for one in infos)
    assert attachment.info.features == set.intersection(*(set(one.features) for one in infos))
    assert attachment.info.rank_count == 1
    assert attachment.pool == MemoryPool(min(pool.block_count for pool in pools), 16)
    assert attachment.previous_epoch == (previous[0] if len(set(previous)) == 1 else 0)
    assert set(attachment.info.arithmetic.split("; ")) == {one.arithmetic for one in infos}
    assert all(one.incarnation_id in attachment.info.incarnation_id for one in infos)


def test_blocks_of_different_sizes_can_not_be_shared() -> None:
    in_order = seats(2, 1)
    claims = [Claimed(each.info, 0) for each in in_order]
    with pytest.raises(WorkerUnusable, match=r"different block sizes: .*has 16.*has 8"):
        merged(in_order, claims, [MemoryPool(9, 16), MemoryPool(9, 8)])


def result(digest: bytes, step_id: int = 4, epoch: int = 1) -> StepResult:
    return StepResult(epoch, step_id, [Row(0)], [1], Tokens([7]), digest=digest)


def test_one_rank_that_leaves_takes_its_replica_along() -> None:
    in_order = seats(2, 1)
    leaving = replace(result(b"same"), is_leaving=True)
    assert agreed(in_order, [result(b"same"), leaving], answering(in_order)).is_leaving
    assert not agreed(in_order, [result(b"same")] * 2, answering(in_order)).is_leaving


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["digest", "no digest", "step", "epoch"])
def test_one_rank_that_applied_something_else_is_named(sizes: tuple[int, int], kind: str) -> None:
    in_order = seats(*sizes)
    answer = answering(in_order)
    results = [result(b"same") for _ in in_order]
    assert agreed(in_order, results, answer) == results[answer]
    other = {
        "digest": result(b"else"),
        "no digest": result(b""),
        "step": result(b"same", step_id=5),
        "epoch": result(b"same", epoch=2),
    }[kind]
    for which in range(len(in_order)):
        if which == answer:
            continue
        mixed = [*results[:which], other, *results[which + 1 :]]
        with pytest.raises(RanksDiverged) as raised:
            agreed(in_order, mixed, answer)
        assert in_order[which].rank.address in str(raised.value)

"""A rank that dies, hangs or never comes: the others' steps end, and they go on in a new group."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import runner_rig, tiny_llama
from tests.support.rank_processes import (
    Rank,
    RankError,
    Replica,
    coordinates,
    print_nothing,
    rendezvous,
)
from tests.support.runner_rig import RunnerRig
from worker_service.domain.plan import StepPlan
from worker_service.runner.model_runner import ModelRunner

pytestmark = pytest.mark.slow

COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one(folder: Path) -> ModelRunner:
    return runner_rig.build(folder, executor="torch", thread_count=1)


@pytest.fixture(scope="module")
def expected(one: ModelRunner) -> list[list[int]]:
    return runner_rig.generate(one, tiny_llama.PROMPTS, COUNT, chunk=16)


@pytest.fixture(scope="module")
def plan(one: ModelRunner) -> StepPlan:
    """The first step of an epoch."""
    rig = RunnerRig(one)
    rig.add(0, tiny_llama.PROMPTS[0])
    return rig.plan({0: 30})


def lost(rank: Rank) -> bool:
    """Whether the rank's next answer is that the group is lost. It comes within PATIENCE."""
    try:
        rank.end()
    except RankError as error:
        assert error.kind == "GroupLost", error
        return True
    return False


@pytest.mark.parametrize(("tensor", "pipeline", "victim"), [(2, 1, 0), (2, 2, 2)], ids=str)
def test_a_rank_killed_mid_step_costs_one_start(
    tensor: int,
    pipeline: int,
    victim: int,
    rank_pool: list[Rank],
    folder: Path,
    expected: list[list[int]],
    plan: StepPlan,
) -> None:
    """The first rank, which keeps the store, and the answering one of four. The survivors are in a
    step and wait for the victim, or for who waits for it; their processes live on."""
    replica = Replica.load(rank_pool, folder, tensor, pipeline)
    replica.join()
    survivors = [rank for index, rank in enumerate(replica.ranks) if index != victim]
    for rank in survivors:
        rank.begin("step", plan)  # the victim never gets it, so none can finish
    replica.ranks[victim].kill()
    assert [lost(rank) for rank in survivors] == [True] * len(survivors)
    for rank in survivors:  # no step of this epoch runs any more
        rank.begin("step", plan)
    assert [lost(rank) for rank in survivors] == [True] * len(survivors)
    successor = Rank()
    rank_pool[victim] = successor
    replica.ranks = rank_pool[: tensor * pipeline]
    options = runner_rig.options(
        folder,
        thread_count=1,
        ranks=coordinates(victim, tensor, pipeline),
        progress=print_nothing,
    )
    address = successor.call("load", options)
    replica.address = address or replica.address
    assert runner_rig.generate(replica, tiny_llama.PROMPTS, COUNT, chunk=16) == expected


@pytest.fixture
def stopped(rank_pool: list[Rank]) -> Iterator[Rank]:
    """A rank that may be stopped, and goes on afterwards."""
    victim = rank_pool[1]
    yield victim
    os.kill(victim.process.pid or 0, signal.SIGCONT)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_a_hung_rank_can_be_left(
    tensor: int,
    pipeline: int,
    rank_pool: list[Rank],
    stopped: Rank,
    folder: Path,
    expected: list[list[int]],
    plan: StepPlan,
) -> None:
    """The step waits until a newer claim abandons it. A rank that comes back is behind, and the
    next group has it again."""
    replica = Replica.load(rank_pool, folder, tensor, pipeline)
    replica.join()
    sound = replica.ranks[0]
    os.kill(stopped.process.pid or 0, signal.SIGSTOP)
    for rank in replica.ranks:
        rank.begin("step", plan)
        rank.begin("memory_pool")  # stands for the claim that waits behind the step
    if pipeline == 1:
        with pytest.raises(AssertionError, match="no answer"):
            sound.end(patience=0.5)
        for rank in replica.ranks:
            rank.abandon(replica.epoch + 1)
        assert lost(sound)
    else:  # the first stage has sent its part; only the tokens are missing
        for rank in replica.ranks:
            rank.abandon(replica.epoch + 1)
        assert lost(sound)
    assert sound.end().block_count > 0
    os.kill(stopped.process.pid or 0, signal.SIGCONT)
    lost(stopped)
    stopped.end()
    assert runner_rig.generate(replica, tiny_llama.PROMPTS, COUNT, chunk=16) == expected


def test_a_rank_that_does_not_come_is_named(
    rank_pool: list[Rank], folder: Path, plan: StepPlan
) -> None:
    replica = Replica.load(rank_pool, folder, 2, 1)
    present, late = replica.ranks
    present.begin("join", rendezvous(replica.address, 50, timeout=0.3))
    with pytest.raises(RankError, match=r"GroupLost: rank 1 did not come to .*:\d+"):
        present.end()
    # A newer claim overtakes a wait that would be long.
    present.begin("join", rendezvous(replica.address, 51))
    present.abandon(52)
    with pytest.raises(RankError, match="GroupLost: a newer claim ended this group"):
        present.end()
    late.begin("join", rendezvous("127.0.0.1:1", 50, timeout=0.3))
    with pytest.raises(RankError, match=r"GroupLost: no store answers at 127\.0\.0\.1:1"):
        late.end()
    late.begin("step", plan)
    assert lost(late)
    replica.epoch = 52
    assert runner_rig.generate(replica, tiny_llama.PROMPTS[:1], 2)


def test_a_claim_without_a_rendezvous_runs_nothing(
    rank_pool: list[Rank], folder: Path, plan: StepPlan
) -> None:
    options = runner_rig.options(
        folder, thread_count=1, ranks=coordinates(0, 2, 1), progress=print_nothing
    )
    rank = rank_pool[0]
    rank.call("load", options)
    rank.begin("step", plan)
    with pytest.raises(RankError, match=r"GroupLost: .* without a rendezvous"):
        rank.end()


def test_a_stage_begins_what_waits_for_nothing(rank_pool: list[Rank], folder: Path) -> None:
    """Two prompts are on their way before the last stage has seen one; a token that is still to be
    sampled holds up its own row, and is the same for every rank."""
    replica = Replica.load(rank_pool, folder, 1, 2)
    first, last = replica.ranks
    rig = RunnerRig(replica)
    rig.add(0, tiny_llama.PROMPTS[0])
    rig.add(1, tiny_llama.PROMPTS[3])
    plans = []
    for row, count in ((0, 30), (1, 64)):
        plans.append(rig.plan({row: count}))
        rig.rows[row].computed += count
        assert first.call("launch", plans[-1]) is False
    results = [last.call("step", plan) for plan in plans]
    assert [first.call("collect").digest for _ in plans] == [each.digest for each in results]
    for result in results:
        rig.take(result)
    assert rig.step({1: 1}).rows.tolist() == [1]


def test_a_bug_on_one_rank_keeps_no_other_waiting(
    rank_pool: list[Rank], folder: Path, expected: list[list[int]], plan: StepPlan
) -> None:
    replica = Replica.load(rank_pool, folder, 2, 2)
    replica.join()
    replica.ranks[3].call("sabotage")
    for rank in replica.ranks:
        rank.begin("step", plan)
    with pytest.raises(RankError, match="ValueError: a bug"):
        replica.ranks[3].end()
    assert lost(replica.ranks[2])  # is in the same layer
    for rank in replica.ranks[:2]:  # have sent their part, and wait for a token
        assert lost(rank)
    assert runner_rig.generate(replica, tiny_llama.PROMPTS, COUNT, chunk=16) == expected


def test_a_refused_plan_leaves_the_group_as_it_is(
    rank_pool: list[Rank], folder: Path, plan: StepPlan
) -> None:
    """Every rank refuses the same, before it talks to any other."""
    replica = Replica.load(rank_pool, folder, 2, 1)
    replica.join()
    unknown = replace(plan, added=())
    malformed = replace(plan, removed_rows=runner_rig.column((99,)))
    for wrong, kind in ((unknown, "PlanMismatch"), (malformed, "PlanInvalid")):
        for rank in replica.ranks:
            rank.begin("step", wrong)
        for rank in replica.ranks:
            with pytest.raises(RankError) as refused:
                rank.end()
            assert refused.value.kind == kind
    assert replica.launch(plan).result().tokens.size == 1


def test_a_plan_waits_for_the_token_that_it_goes_on_from(
    rank_pool: list[Rank], folder: Path, expected: list[list[int]]
) -> None:
    """Plans ahead of their results, as the controller sends them."""
    replica = Replica.load(rank_pool, folder, 1, 2)
    first, last = replica.ranks
    rig = RunnerRig(replica)
    rig.add(0, tiny_llama.PROMPTS[0])
    plans = []
    for count in (30, 1, 1):
        plans.append(rig.plan({0: count}))
        rig.rows[0].computed += count
        rig.rows[0].tokens.append(0)  # not known yet: the next plan takes it from this step
    for plan in plans:
        first.begin("launch", plan)
    assert first.end() is False
    results = [last.call("step", plan) for plan in plans]
    assert [result.tokens.tolist() for result in results] == [[each] for each in expected[0][:3]]
    for _ in plans[1:]:
        first.end()
    digests = [first.call("collect").digest for _ in plans]
    assert digests == [result.digest for result in results]

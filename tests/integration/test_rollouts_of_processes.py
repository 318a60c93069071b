"""Rollouts over real processes: clients notice nothing, and whoever is killed, they complete."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.rollout_stand import (
    END_SECONDS,
    all_current,
    clients,
    names_of,
    operating,
    order,
    standing,
    states,
)
from twinplane.control.v1 import control_pb2 as pb

pytestmark = pytest.mark.slow

CLIENTS, TOKENS = 16, 48
PREPARING, EXCHANGING, CURRENT = (
    pb.REPLICA_PHASE_PREPARING,
    pb.REPLICA_PHASE_EXCHANGING,
    pb.REPLICA_PHASE_CURRENT,
)


async def test_updates_under_streams_fail_nobody_and_are_told(tmp_path: Path) -> None:
    """Without errors, and from the end of a rollout on, every answer is of its weights."""
    async with (
        asyncio.timeout(END_SECONDS),
        standing(tmp_path) as stand,
        operating(stand) as stub,
        clients(stand, CLIENTS, TOKENS) as answers,
    ):
        for strategy, policy, mixes in (
            (pb.ROLLOUT_STRATEGY_ROLLING, pb.IN_FLIGHT_POLICY_FINISH_ON_OLD, False),
            (pb.ROLLOUT_STRATEGY_ALL_AT_ONCE, pb.IN_FLIGHT_POLICY_CONTINUE_ON_NEW, True),
            (pb.ROLLOUT_STRATEGY_ROLLING, pb.IN_FLIGHT_POLICY_KEEP_KV, True),
            (pb.ROLLOUT_STRATEGY_ALL_AT_ONCE, pb.IN_FLIGHT_POLICY_FINISH_ON_OLD, False),
        ):
            name = "b" if answers and names_of(answers[-1]) == ["a"] else "a"
            started = len(answers)
            while len(answers) < started + CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            first = len(answers)
            messages = order(name, strategy=strategy, in_flight=policy)
            await stub.UpdateWeights(iter(messages))
            last = [state async for state in states(stub)][-1]
            assert last.rollout.state == pb.ROLLOUT_STATE_DONE, last
            done = len(answers)
            # Each client's answer of now may have begun before; its next has not.
            while len(answers) < done + 3 * CLIENTS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert all(names_of(answer) == [name] for answer in answers[done + 2 * CLIENTS :])
            spans = [answer.weights_spans for answer in answers[first:]]
            assert any(len(each) > 1 for each in spans) <= mixes
            assert all(sum(span.token_count for span in each) == TOKENS for each in spans)


@pytest.mark.parametrize("strategy", [pb.ROLLOUT_STRATEGY_ROLLING, pb.ROLLOUT_STRATEGY_ALL_AT_ONCE])
async def test_whoever_is_killed_in_a_rollout_it_completes(tmp_path: Path, strategy: int) -> None:
    """The control plane (2) or a worker, when a replica is first seen to be in a phase."""
    async with standing(tmp_path) as stand, operating(stand) as stub:
        name = "b"
        for victim in (2, 0, 1):
            for phase in (PREPARING, EXCHANGING, CURRENT, None):
                name = "a" if name == "b" else "b"
                async with asyncio.timeout(END_SECONDS):
                    messages = order(
                        name, strategy=strategy, in_flight=pb.IN_FLIGHT_POLICY_CONTINUE_ON_NEW
                    )
                    answer = await stub.UpdateWeights(iter(messages), wait_for_ready=True)
                    is_killed = phase is None
                    if is_killed:
                        stand.kill(victim)
                    last = None
                    async for state in states(stub):
                        last = state
                        if not is_killed and phase in [each.phase for each in state.replicas]:
                            stand.kill(victim)
                            is_killed = True
                    assert last is not None
                    assert last.rollout.rollout_id == answer.rollout.rollout_id
                    assert last.rollout.state == pb.ROLLOUT_STATE_DONE, last
                    state = await all_current(stub, name)
                    assert {each.digest for each in state.replicas} == {state.rollout.target.digest}

"""Who gets a strike, who becomes a suspect, who runs alone, who is convicted: exact effects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.plan import Row, SamplePlan, StepPlan
from control_plane.core.request import OutputKind
from control_plane.core.scheduler import Scheduler
from control_plane.core.suspicion import Accusation
from tests.support.core_requests import (
    WEIGHTS,
    add,
    config,
    held_result,
    name_of,
    planned,
    request,
    result,
    scheduler_of,
    sequence,
)

MOST = 4
UNKNOWN = Accusation(detail="connection broken")


def scheduler(inflight: int = 2, **changes: int) -> Scheduler:
    return scheduler_of(config(inflight=inflight, **changes))


def strikes(made: Scheduler) -> dict[str, int]:
    return {
        own.request.request_id: own.strikes for own in made.ledger.sequences.values() if own.strikes
    }


def suspects(made: Scheduler) -> list[str]:
    return [own.request.request_id for own in made.ledger.suspects.values()]


def lose(made: Scheduler, accusation: Accusation = UNKNOWN, most: int = MOST) -> list[str]:
    """The claim ends and another begins; who was convicted."""
    judgement = made.accuse(accusation, most)
    outputs = judgement.convicted
    ledger = made.ledger
    made.resync(ledger.config, ledger.epoch + 1, WEIGHTS)
    invariants.check(made)
    for output in outputs:
        assert output.finish is not None and output.finish.reason is FinishReason.FAULT
    return [name_of(output) for output in outputs]


def answer(made: Scheduler, plan: StepPlan) -> list[SequenceOutput]:
    [message] = [message for message in made.ledger.inflight if message.step_id == plan.step_id]
    outputs = made.update(result(plan, dict.fromkeys(message.rows, 9)))
    invariants.check(made)
    return outputs


def prompts(plan: StepPlan) -> list[int]:
    return [added.token_ids[0] for added in plan.added]


def test_all_in_flight_get_a_strike_and_nobody_else() -> None:
    made = scheduler(rows=2)
    for number, name in enumerate(("a", "b", "c")):
        add(made, request(name, [number, 1], arrival=float(number)))
    planned(made)
    assert lose(made) == []
    assert strikes(made) == {"a": 1, "b": 1}, "c waits for a row"
    assert not suspects(made)


def test_only_the_named_step_is_accused() -> None:
    made = scheduler(budget=4)
    add(made, request("a", [1, 1, 1, 1]))
    add(made, request("b", [2, 2, 2, 2], arrival=1.0))
    first, second = planned(made), planned(made)
    assert prompts(second) == [2]
    lose(made, replace(UNKNOWN, step_id=first.step_id))
    assert strikes(made) == {"a": 1}


@pytest.mark.parametrize("is_certain", [False, True])
def test_only_the_named_rows_are_accused(is_certain: bool) -> None:
    made = scheduler()
    add(made, request("a", [1, 1]))
    add(made, request("b", [2, 2], arrival=1.0))
    plan = planned(made)
    blame = Accusation(plan.step_id, (plan.added[1].row,), is_certain, "INVALID_PLAN")
    assert lose(made, blame) == (["b"] if is_certain else [])
    assert strikes(made) == ({} if is_certain else {"b": 1})


def test_a_row_that_is_nobodys_any_more_convicts_nobody() -> None:
    made = scheduler()
    add(made, request("a", [1, 1]))
    add(made, request("b", [2, 2], arrival=1.0))
    plan = planned(made)
    made.finish(sequence("b"), FinishReason.CANCELLED)
    blame = Accusation(plan.step_id, (plan.added[1].row,), True, "INVALID_PLAN")
    assert lose(made, blame) == []
    assert strikes(made) == {}


@pytest.mark.parametrize("rows", [(), (Row(3),)])
def test_certainty_without_a_name_convicts_nobody(rows: tuple[Row, ...]) -> None:
    made = scheduler()
    add(made, request("a", [1, 1]))
    plan = planned(made)
    assert lose(made, Accusation(plan.step_id, rows, True, "INVALID_PLAN")) == []
    assert strikes(made) == {"a": 1}


def test_a_new_token_takes_the_strikes_away() -> None:
    made = scheduler(inflight=1)
    add(made, request("a", [1, 1]))
    for _ in range(3 * MOST):
        answer(made, planned(made))
        planned(made)
        assert lose(made) == []
        assert strikes(made) == {"a": 1}


def test_a_chunk_that_no_worker_had_answered_takes_the_strikes_away() -> None:
    made = scheduler(inflight=1, budget=4, caching=False)
    add(made, request("a", list(range(20))))
    planned(made)
    lose(made)
    for chunks in (1, 2, 3):
        for _ in range(chunks):
            answer(made, planned(made))
        planned(made)
        assert lose(made) == []
        assert strikes(made) == {"a": 1}


def test_answered_chunks_of_a_known_part_do_not() -> None:
    """The poison lies behind the first chunk, which each claim answers."""
    made = scheduler(inflight=1, budget=4, caching=False)
    add(made, request("a", list(range(20))))
    for count in range(1, MOST + 1):
        answer(made, planned(made))
        planned(made)
        assert lose(made) == (["a"] if count == MOST else [])


def test_suspects_run_alone_one_after_another_and_are_acquitted() -> None:
    made = scheduler()
    for number, name in enumerate(("a", "b")):
        add(made, request(name, [number, 1], arrival=float(number)))
    for _ in range(2):
        planned(made)
        lose(made)
    assert suspects(made) == ["a", "b"]
    add(made, request("c", [2, 1], arrival=-1.0))
    for tokens in ([0], [1]):
        plan = planned(made)
        assert prompts(plan) == tokens and len(plan.scheduled.rows) == 1
        assert made.schedule(0.0) is None, "nothing beside a suspect"
        answer(made, plan)
    plan = planned(made)
    assert not suspects(made) and strikes(made) == {}
    assert sorted(prompts(plan)) == [0, 2], "b runs already, a made room for it"
    invariants.check(made)


def test_the_last_strikes_are_got_alone_and_convict() -> None:
    made = scheduler()
    add(made, request("good", [1, 1]))
    add(made, request("bad", [2, 2], arrival=1.0))
    for _ in range(2):
        planned(made)
        lose(made)
    answer(made, planned(made))  # the good one's trial
    plan = planned(made)
    assert prompts(plan) == [2] and plan.removed_rows, "the bad one has the worker to itself"
    assert lose(made) == []
    assert prompts(planned(made)) == [2]
    assert lose(made) == ["bad"]
    assert prompts(planned(made)) == [1]


def test_a_suspect_that_leaves_is_forgotten() -> None:
    made = scheduler()
    add(made, request("a", [1, 1]))
    for _ in range(2):
        planned(made)
        lose(made)
    made.finish(sequence("a"), FinishReason.CANCELLED)
    assert not made.ledger.suspects
    add(made, request("b", [2, 2]))
    assert prompts(planned(made)) == [2]


def test_a_held_suspect_is_acquitted_by_being_held() -> None:
    """Its step was answered. It waits for a mask, and nobody waits for it."""
    made = scheduler()
    add(made, request("h", [1, 1], output=OutputKind.HOLD))
    add(made, request("s", [2, 2], arrival=1.0))
    for _ in range(2):
        planned(made)
        lose(made)
    plan = planned(made)
    made.update(held_result(plan, {}, [plan.added[0].row]))
    assert prompts(planned(made)) == [2]
    assert suspects(made) == ["s"]


def test_rows_of_a_sample_plan_are_accused_too() -> None:
    made = scheduler()
    for name, token in (("h", 1), ("i", 2)):
        add(made, request(name, [token, 1], output=OutputKind.HOLD))
    plan = planned(made)
    rows = [added.row for added in plan.added]
    made.update(held_result(plan, {}, rows))
    for name in ("h", "i"):
        made.sample(sequence(name), b"\x0f\0\0\0")
    message = made.next_message(0.0)
    assert isinstance(message, SamplePlan)
    assert lose(made, Accusation(message.step_id, (rows[1],), True, "no")) == ["i"]


def test_a_claim_that_ends_sooner_than_the_last_is_no_progress() -> None:
    made = scheduler(inflight=1, budget=4, caching=False)
    add(made, request("a", list(range(20))))
    for chunks in (3, 0, 2):
        for _ in range(chunks):
            answer(made, planned(made))
        planned(made)
        assert lose(made) == []
    planned(made)
    assert lose(made) == ["a"]

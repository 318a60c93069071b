"""A worker that comes back other than it was: what can go on does, the rest ends with an error."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.errors import RequestTooLong
from control_plane.core.events import FinishReason
from control_plane.core.request import OutputKind, Request
from control_plane.shell.engine import EngineLost, VocabularyMismatch
from control_plane.shell.ports import HELD_SAMPLING
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.successor import ArithmeticChange
from tests.simulation.fake_machine import VOCABULARY, WEIGHTS, Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]
LONG = list(range(2, 40))
FIRST_LENGTH = 64
END = ReplicaSettings(check_invariants=True)
CONTINUE = ReplicaSettings(arithmetic_change=ArithmeticChange.CONTINUE, check_invariants=True)


def come_back(worker: FakeWorker, **changes: object) -> None:
    for name, value in changes.items():
        setattr(worker.machine, name, value)
    worker.machine.restart()
    worker.break_connection()


async def begun_and_waiting(
    rig: Rig, worker: FakeWorker, waiting: Request, **changes: object
) -> tuple[Answer, Answer]:
    """One has five tokens or more when the worker changes, the other waits for its row."""
    first = rig.submit(request("begun", PROMPT, 30))
    second = rig.submit(waiting)
    await until(lambda: len(first.tokens) >= 5)
    come_back(worker, **changes)
    await rig.settled(first, second)
    assert first.tokens == expected_tokens(PROMPT, 30)[: len(first.tokens)]
    digest = str(changes.get("digest", WEIGHTS))
    right = expected_tokens(waiting.prompt_token_ids, waiting.stop.max_tokens, digest=digest)
    assert second.tokens == right[: len(second.tokens)]
    return first, second


Case = tuple[dict[str, object], Request, type[Exception] | None, type[Exception] | None]
SHORT = request("waiting", [3, 4], 4)
CASES: dict[str, Case] = {
    "nothing": ({}, SHORT, None, None),
    "a shorter length": ({"max_sequence_token_count": 8}, SHORT, EngineLost, None),
    "too short for the prompt": (
        {"max_sequence_token_count": 38}, request("waiting", LONG, 4), None, RequestTooLong,
    ),
    "just long enough for the prompt": (
        {"max_sequence_token_count": 39}, request("waiting", LONG, 4), None, None,
    ),
    "a smaller pool": ({"block_count": 3}, request("waiting", LONG, 4), EngineLost, RequestTooLong),
    "larger blocks": ({"block_size": 16, "block_count": 5}, SHORT, None, None),
    "fewer tokens a step": ({"max_step_token_count": 1}, SHORT, None, None),
    "more of everything": (
        {"max_sequence_token_count": 90, "block_count": 90, "max_sequence_count": 9},
        SHORT, None, None,
    ),
    "other weights": ({"digest": "b" * 64}, SHORT, EngineLost, None),
    "a smaller vocabulary": (
        {"vocabulary_size": 30, "digest": "b" * 64},
        request("waiting", LONG, 4), EngineLost, VocabularyMismatch,
    ),
    "a smaller vocabulary that suffices": (
        {"vocabulary_size": 30, "digest": "b" * 64}, SHORT, EngineLost, None,
    ),
    "a larger vocabulary": (
        {"vocabulary_size": 200, "digest": "b" * 64}, SHORT, EngineLost, None,
    ),
    "other arithmetic": ({"arithmetic": "torch"}, SHORT, EngineLost, None),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "waiting", "first", "second"), CASES.values(), ids=CASES)
def test_each_change_ends_only_what_it_must(
    changes: dict[str, object],
    waiting: Request,
    first: type[Exception] | None,
    second: type[Exception] | None,
) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_count=1, arithmetic="compiled"), lambda: 0.01)
        async with running(loop, worker, END) as rig:
            answers = await begun_and_waiting(rig, worker, waiting, **changes)
            for answer, expected in zip(answers, (first, second), strict=True):
                assert type(answer.error) is (expected or type(None))
                if expected is None:
                    assert answer.tokens and answer.finish is not None
                    assert answer.finish.reason is FinishReason.LENGTH
            stats = rig.stats()
            assert stats.running == stats.waiting == stats.kv_active_tokens == 0
            invariants.check(rig.core())

    run_virtual(main)


@pytest.mark.parametrize("chosen", [END, CONTINUE], ids=["end", "continue"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("compiled", "torch"), ("", "compiled"), ("compiled", "")],
    ids=["other", "from 0.2.0", "back to 0.2.0"],
)
def test_other_arithmetic_is_told(chosen: ReplicaSettings, before: str, after: str) -> None:
    """Whoever goes on behind tokens of another worker is told; whoever had none need not be.

    Workers of 0.2.0 do not name theirs: docs/upgrades.md says in which order to exchange planes.
    """

    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_count=1, arithmetic=before), lambda: 0.01)
        async with running(loop, worker, chosen) as rig:
            first, second = await begun_and_waiting(rig, worker, SHORT, arithmetic=after)
            if chosen is END:
                assert isinstance(first.error, EngineLost) and "arithmetic" in str(first.error)
            else:
                assert first.finish is not None and first.finish.arithmetic_changed
                assert len(first.tokens) == 30
            assert second.finish is not None and not second.finish.arithmetic_changed

    run_virtual(main)


def test_a_loss_with_the_same_arithmetic_is_no_change() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(arithmetic="compiled"), lambda: 0.01)
        async with running(loop, worker, CONTINUE) as rig:
            answer = rig.submit(request("a", PROMPT, 30))
            await until(lambda: len(answer.tokens) >= 5)
            come_back(worker)
            await rig.settled(answer)
            assert answer.finish is not None and not answer.finish.arithmetic_changed

    run_virtual(main)


def test_a_worker_that_lost_held_rows_ends_those_who_need_them() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(features=frozenset({HELD_SAMPLING})), lambda: 0.01)
        async with running(loop, worker, END) as rig:
            held = rig.submit(replace(request("held", PROMPT, 5), output=OutputKind.HOLD))
            free = rig.submit(request("free", PROMPT, 5))
            come_back(worker, features=frozenset())
            await rig.settled(held, free)
            assert isinstance(held.error, EngineLost)
            assert free.tokens == expected_tokens(PROMPT, 5)

    run_virtual(main)


def draw_changes(rng: random.Random) -> dict[str, object]:
    block_size = rng.choice((1, 3, 4, 16))
    return {
        "max_sequence_count": rng.randrange(1, 6),
        "max_step_token_count": rng.choice((1, 2, 7, 40)),
        "max_sequence_token_count": rng.choice((2, 3, 9, 17, 40, 64, 100)),
        "block_size": block_size,
        "block_count": 2 + rng.randrange(1, 120) // block_size,
        "vocabulary_size": rng.choice((VOCABULARY, VOCABULARY, 20, 60, 300)),
        "digest": rng.choice("aaab") * 64,
        "arithmetic": rng.choice(("one", "one", "one", "two")),
        "generation": rng.choice((1, 1, 2)),
    }


@pytest.mark.parametrize("seed", range(60))
def test_random_successors_one_after_another(seed: int) -> None:
    """Each answer is right as far as it goes, and has tokens or is an error: never OK and empty."""
    rng = random.Random(seed)
    asked = [
        request(
            f"r{index}",
            [rng.randrange(2, VOCABULARY) for _ in range(rng.choice((1, 4, 20, 50)))],
            rng.randrange(1, 14),
            seed=index,
        )
        for index in range(rng.randrange(1, 9))
    ]

    async def main(loop: VirtualLoop) -> None:
        machine = Machine(arithmetic="one", max_sequence_count=3)
        worker = FakeWorker(machine, lambda: 0.01)
        async with running(loop, worker, rng.choice((END, CONTINUE))) as rig:
            answers = [rig.submit(own) for own in asked]
            for _ in range(rng.randrange(1, 4)):
                await asyncio.sleep(rng.choice((0.0, 0.02, 0.1)))
                come_back(worker, **draw_changes(rng))
                # It may be too small to be used at all; then everybody waits for the next.
                await asyncio.sleep(0.3)
            come_back(worker, max_sequence_token_count=64, block_count=99, block_size=4)
            await rig.settled(*answers)
            for own, answer in zip(asked, answers, strict=True):
                count, seed = own.stop.max_tokens, own.seed
                rights = [
                    expected_tokens(own.prompt_token_ids, count, seed, digest=letter * 64)
                    for letter in "ab"
                ]
                got = answer.tokens
                assert got in [right[: len(got)] for right in rights], "of one version"
                assert answer.finish is None or len(answer.finish.spans) == 1
                if answer.error is None:
                    assert answer.tokens, "OK and empty"
                else:
                    kinds = (EngineLost, RequestTooLong, VocabularyMismatch)
                    assert isinstance(answer.error, kinds)
            await asyncio.sleep(1.0)
            stats = rig.stats()
            assert stats.running == stats.waiting == stats.inflight == stats.kv_active_tokens == 0
            invariants.check(rig.core())

    run_virtual(main)

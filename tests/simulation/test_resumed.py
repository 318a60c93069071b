"""Requests that bring what they have generated, among others, on workers that differ and fail."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.request import Origin, Request, Resumed
from control_plane.shell.engine import CannotResume, DuplicateRequest, EngineLost
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import ArithmeticChange
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]
RIGHT = expected_tokens(PROMPT, 30)
END = ReplicaSettings(check_invariants=True)
CONTINUE = ReplicaSettings(arithmetic_change=ArithmeticChange.CONTINUE, check_invariants=True)
DIGEST = Machine().digest


def resumed(name: str, done: Sequence[int], origin: Origin | None = None, **fields: int) -> Request:
    """The request of PROMPT for 30 tokens, behind those that are done."""
    asked = request(name, PROMPT, 30, **fields)
    return replace(asked, resumed=Resumed(array("I", done), origin))


def machine(arithmetic: str = "") -> FakeWorker:
    return FakeWorker(Machine(arithmetic=arithmetic), lambda: 0.01)


def nothing_is_held(rig: Rig) -> None:
    stats = rig.stats()
    assert stats.running == stats.waiting == stats.kv_active_tokens == 0
    invariants.check(rig.core())


@pytest.mark.parametrize("seed", range(50))
def test_they_go_on_beside_others_whatever_becomes_of_the_worker(seed: int) -> None:
    """Each gets what it would have got alone, from where it was, and its neighbours theirs."""
    draw = random.Random(seed)

    async def main(loop: VirtualLoop) -> None:
        worker = machine()
        async with running(loop, worker, END, seed) as rig:
            asked, right = [], []
            for number in range(6):
                prompt = [draw.randrange(40) for _ in range(draw.randint(1, 12))]
                count = draw.randint(1, 20)
                whole = expected_tokens(prompt, count)
                done = draw.randrange(count) if number % 2 else 0
                one = request(f"r{number}", prompt, count)
                if number % 2:
                    one = replace(one, resumed=Resumed(array("I", whole[:done])))
                asked.append(one)
                right.append((whole[done:], len(prompt), count))
            answers = [rig.submit(one) for one in asked]
            if draw.random() < 0.6:
                await until(lambda: sum(len(one.tokens) for one in answers) >= draw.randint(1, 9))
                if draw.random() < 0.5:
                    worker.machine.restart()
                worker.break_connection()
            await rig.settled(*answers)
            for answer, (tokens, prompt_count, count) in zip(answers, right, strict=True):
                assert answer.error is None and answer.finish is not None
                assert answer.tokens == tokens
                assert answer.finish.usage.prompt_tokens == prompt_count
                assert answer.finish.usage.completion_tokens == count
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("chosen", [END, CONTINUE], ids=["end", "continue"])
@pytest.mark.parametrize(
    ("origin", "differs", "changed"),
    [
        (None, (), False),
        (Origin(DIGEST, "one"), (), False),
        (Origin(DIGEST, "one", arithmetic_changed=True), (), True),
        (Origin(DIGEST, "two"), ("arithmetic",), True),
        (Origin(DIGEST, ""), ("arithmetic",), True),
        (Origin("b" * 64, "one"), ("weights",), False),
        (Origin("", "one"), ("weights",), False),
        (Origin("b" * 64, "two"), ("weights", "arithmetic"), False),
    ],
)
def test_where_the_tokens_come_from_decides_whether_they_go_on(
    chosen: ReplicaSettings, origin: Origin | None, differs: tuple[str, ...], changed: bool
) -> None:
    if chosen is CONTINUE:
        differs = tuple(what for what in differs if what != "arithmetic")

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, machine("one"), chosen) as rig:
            await rig.attached()
            stream = TokenStream()
            if differs:
                with pytest.raises(CannotResume) as refused:
                    rig.fleet.submit(resumed("r", RIGHT[:4], origin), stream)
                assert refused.value.differs == differs
                nothing_is_held(rig)
                return
            answer = rig.submit(resumed("r", RIGHT[:4], origin))
            await rig.settled(answer)
            assert answer.tokens == RIGHT[4:] and answer.finish is not None
            assert answer.finish.arithmetic_changed is changed
            nothing_is_held(rig)

    run_virtual(main)


def test_the_client_of_a_request_that_still_runs_takes_its_place() -> None:
    """Its connection broke, and the server has not noticed. Whoever lacks the seed is refused."""

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, machine(), END) as rig:
            neighbour = rig.submit(request("n", [1, 2], 30))
            old = rig.submit(request("r", PROMPT, 30, seed=3))
            await until(lambda: len(old.tokens) >= 5)
            right = expected_tokens(PROMPT, 30, seed=3)
            for asked in (request("r", PROMPT, 30, seed=3), resumed("r", right[:4], seed=4)):
                with pytest.raises(DuplicateRequest):
                    rig.fleet.submit(asked, TokenStream())
            new = rig.submit(resumed("r", right[:4], seed=3))
            await rig.settled(old, new, neighbour)
            assert old.finish is not None and old.finish.reason is FinishReason.CANCELLED
            assert new.tokens == right[4:]
            assert neighbour.tokens == expected_tokens([1, 2], 30)
            nothing_is_held(rig)

    run_virtual(main)


def test_of_several_that_could_the_one_that_made_the_tokens_goes_on() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [machine("one"), machine("two")], CONTINUE) as rig:
            await rig.attached()
            for number, arithmetic in enumerate(("one", "two") * 5):
                origin = Origin(DIGEST, arithmetic)
                answer = rig.submit(resumed(f"r{number}", RIGHT[:number], origin))
                await rig.settled(answer)
                assert answer.finish is not None and not answer.finish.arithmetic_changed
                assert answer.tokens == RIGHT[number:]

    run_virtual(main)


def test_another_replica_may_have_what_the_first_lacks() -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [machine("one"), machine("two")]
        async with running(loop, workers, END) as rig:
            await rig.attached()
            for arithmetic in ("one", "two", "one", "two"):
                origin = Origin(DIGEST, arithmetic)
                answer = rig.submit(resumed(f"r-{arithmetic}-{loop.time()}", RIGHT[:4], origin))
                await rig.settled(answer)
                assert answer.tokens == RIGHT[4:], "the one that made them"
            with pytest.raises(CannotResume):
                rig.fleet.submit(resumed("r", RIGHT[:4], Origin(DIGEST, "three")), TokenStream())
            workers[1].kill()
            await until(lambda: not rig.fleet.replicas[1].attached)
            # The one that is away may be the one: that is worth waiting for.
            with pytest.raises(EngineLost):
                rig.fleet.submit(resumed("r", RIGHT[:4], Origin(DIGEST, "three")), TokenStream())

    run_virtual(main)

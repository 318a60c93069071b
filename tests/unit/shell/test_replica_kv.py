"""What a reconnect keeps of the KV, and when it keeps none; virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.plan import StepResult, WeightVersion
from control_plane.core.request import OutputKind
from control_plane.core.tokens import Tokens
from control_plane.shell.engine import EngineLost
from control_plane.shell.ports import HELD_SAMPLING, Attachment, MemoryPool
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

BLOCK_SIZE = 4
PROMPTS = [[2 + n, *range(2, 32)] for n in range(3)]
COUNT = 30
ANSWERED = 10


def worker() -> FakeWorker:
    machine = Machine(block_count=100, block_size=BLOCK_SIZE, max_step_token_count=64)
    return FakeWorker(machine, lambda: 0.01)


async def interrupted(rig: Rig, interrupt: Callable[[], None]) -> int:
    """Three requests of which the worker is lost in the middle. The tokens computed again."""
    answers = [rig.submit(request(f"r{n}", prompt, COUNT)) for n, prompt in enumerate(PROMPTS)]
    await until(lambda: len(answers[0].tokens) >= ANSWERED)
    before = rig.stats()
    interrupt()
    await rig.settled(*answers)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == expected_tokens(prompt, COUNT)
        assert answer.finish is not None and answer.finish.usage.completion_tokens == COUNT
    after = rig.stats()
    assert after.prompt_tokens == before.prompt_tokens, "a prompt counts once"
    assert after.generated_tokens == len(PROMPTS) * COUNT
    return after.recomputed_tokens


def resyncs(rig: Rig) -> tuple[float, float]:
    """How many kept the KV, and how many did not."""
    replica = rig.telemetry.replicas["0"]
    return replica.resync_counts["kept"], replica.resync_counts["discarded"]


@pytest.mark.parametrize("executed_count", [0, 1, 2])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_broken_connection_recomputes_nothing_that_was_answered(
    executed_count: int, synchronous: bool
) -> None:
    """But the last block of each sequence, which is not full; whatever the worker has executed of
    the plans that were in flight."""

    async def main(loop: VirtualLoop) -> None:
        fake = worker()
        async with running(loop, fake, settings(synchronous=synchronous)) as rig:
            recomputed = await interrupted(rig, lambda: fake.break_connection(executed_count))
            in_flight = 1 if synchronous else 2
            assert recomputed <= len(PROMPTS) * (BLOCK_SIZE - 1 + in_flight)
            assert fake.attach_count == 2
            assert resyncs(rig) == (1, 0)

    run_virtual(main)


def test_prefixes_outlive_a_broken_connection() -> None:
    async def main(loop: VirtualLoop) -> None:
        fake = worker()
        async with running(loop, fake) as rig:
            await rig.settled(rig.submit(request("first", PROMPTS[0], COUNT)))
            fake.break_connection()
            await asyncio.sleep(1.0)
            again = rig.submit(request("again", PROMPTS[0], COUNT))
            await rig.settled(again)
            assert again.tokens == expected_tokens(PROMPTS[0], COUNT)
            assert again.finish is not None
            assert again.finish.usage.cached_prompt_tokens == len(PROMPTS[0]) // 4 * 4

    run_virtual(main)


def test_kv_outlives_one_broken_connection_after_the_other() -> None:
    async def main(loop: VirtualLoop) -> None:
        fake = worker()
        async with running(loop, fake) as rig:
            answer = rig.submit(request("a", PROMPTS[0], COUNT))
            for count in range(5, 30, 5):
                await until(lambda count=count: len(answer.tokens) >= count)  # type: ignore[misc]
                fake.break_connection(1)
                await rig.attached()
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPTS[0], COUNT)
            assert resyncs(rig) == (5, 0)

    run_virtual(main)


def rival(fake: FakeWorker) -> None:
    """Another controller uses the worker meanwhile, and writes over its KV."""
    fake.break_connection()
    fake.machine.claim(fake.machine.epoch + 1)
    fake.machine.kv.clear()


def restart(fake: FakeWorker) -> None:
    fake.break_connection()
    fake.machine.restart()


def reload_weights(fake: FakeWorker) -> None:
    fake.break_connection()
    fake.machine.generation += 1
    fake.machine.kv.clear()


def shrink(fake: FakeWorker) -> None:
    fake.break_connection()
    fake.machine.block_count -= 1


def drift_apart(fake: FakeWorker) -> None:
    """Rows vanish behind the replica's back: the worker refuses the next plan."""
    for row in fake.machine.rows.values():
        row.computed += 1


@pytest.mark.parametrize("interrupt", [rival, restart, reload_weights, shrink, drift_apart])
def test_after_anything_worse_all_is_computed_again(
    interrupt: Callable[[FakeWorker], None],
) -> None:
    async def main(loop: VirtualLoop) -> None:
        fake = worker()
        async with running(loop, fake) as rig:
            recomputed = await interrupted(rig, lambda: interrupt(fake))
            answered = sum(map(len, PROMPTS)) + len(PROMPTS) * (ANSWERED - 1)
            assert recomputed > answered * 2 // 3, "but what prefixes share"
            assert resyncs(rig) == (0, 1)

    run_virtual(main)


def test_a_result_that_nobody_asked_for_costs_the_kv() -> None:
    """The worker's word is not to be trusted any more."""

    class Confused(FakeWorker):
        confused = False

        async def receive(self) -> StepResult:
            result = await super().receive()
            if self.confused:
                self.confused = False
                return StepResult(result.epoch, 999, [], [], Tokens([]))
            return result

    async def main(loop: VirtualLoop) -> None:
        fake = Confused(worker().machine, lambda: 0.01)
        async with running(loop, fake) as rig:
            await interrupted(rig, lambda: setattr(fake, "confused", True))
            assert resyncs(rig) == (0, 1)

    run_virtual(main)


def attachment(**changes: Any) -> Attachment:
    """Epoch 8 after epoch 7, of an unchanged worker; `changes` are WorkerInfo's."""
    claimed = Machine(epoch=7).claim(8)
    return replace(claimed, info=replace(claimed.info, **changes))


BEFORE = replace(attachment(epoch=7), previous_epoch=6)


@pytest.mark.parametrize(
    ("now", "kept"),
    [
        (attachment(), True),
        (attachment(max_sequence_count=2), True),
        (attachment(incarnation_id="another"), False),
        (attachment(weight_version=WeightVersion(2, "a" * 64)), False),
        (attachment(weight_version=WeightVersion(1, "b" * 64)), False),
        (replace(attachment(), pool=MemoryPool(34, 4)), False),
        (replace(attachment(), pool=MemoryPool(33, 8)), False),
        (replace(attachment(), previous_epoch=0), False),
        (replace(attachment(), previous_epoch=8), False),
    ],
)
def test_when_kv_is_still_there(now: Attachment, kept: bool) -> None:
    assert now.has_kv_of(BEFORE) is kept


@pytest.mark.parametrize("can_hold", [False, True])
def test_a_request_with_masks_needs_a_worker_that_can_hold_rows(can_hold: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        fake = worker()
        fake.machine.features = frozenset({HELD_SAMPLING} if can_hold else ())
        async with running(loop, fake) as rig:
            asked = replace(request("masked", PROMPTS[0], 3), output=OutputKind.HOLD)
            if can_hold:
                rig.submit(asked)
                assert rig.stats().waiting == 1
            else:
                with pytest.raises(EngineLost, match="mask"):
                    rig.submit(asked)
            rig.fleet.finish(asked.request_id, FinishReason.CANCELLED)

    run_virtual(main)

"""What sequences have cost by their ends, and what the log says of steps and lost patience."""

from __future__ import annotations

import asyncio
import logging
import random
import re

import pytest

from control_plane.core.account import Account
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import FinishReason
from control_plane.core.request import RequestId
from control_plane.shell import pipeline
from control_plane.shell.limits import capacity_of
from control_plane.shell.stream import TokenStream
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, read, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

STEP = 0.1
OUTSIDE = (FinishReason.CANCELLED, FinishReason.DEADLINE)
GIVEN_UP = "requests given up: the worker stays away"


def submitted(
    rig: Rig, name: str, prompt: list[int], most: int
) -> tuple[TokenStream, Answer, float]:
    """A request that is read by a task of its own; its arrival."""
    stream, answer, now = TokenStream(), Answer(), rig.loop.time()
    rig.fleet.submit(request(name, prompt, most, arrival=now), stream)
    rig.group.create_task(read(stream, answer))
    return stream, answer, now


def accounted(stream: TokenStream) -> Account:
    assert stream.account is not None
    return stream.account


def test_who_waits_for_a_row_has_queued_so_long() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_count=1), lambda: STEP)
        async with running(loop, worker) as rig:
            first, answer, _ = submitted(rig, "first", [2, 3], 10)
            second, late, _ = submitted(rig, "second", [4, 5], 3)
            third, _, _ = submitted(rig, "third", [6], 3)
            await rig.settled(answer)
            assert rig.fleet.finish(RequestId("third"), FinishReason.CANCELLED)
            await rig.settled(late)
        assert accounted(first).queue_seconds == 0
        assert accounted(first).first_token_seconds == pytest.approx(STEP)
        assert accounted(first).seconds == pytest.approx(10 * STEP)
        assert accounted(first).usage.completion_tokens == 10
        assert accounted(second).queue_seconds >= 9 * STEP
        assert accounted(second).reason is FinishReason.LENGTH
        waited = accounted(third)
        assert (waited.reason, waited.first_token_seconds) == (FinishReason.CANCELLED, None)
        assert waited.queue_seconds == waited.seconds == pytest.approx(10 * STEP, rel=0.01)

    run_virtual(main)


@pytest.mark.parametrize("seed", spread(range(60), 15))
def test_accounts_agree_with_what_clients_got(seed: int) -> None:
    """Preemptions, losses and cancellations: times in order, tokens as they were read."""

    async def main(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        machine = Machine(max_sequence_count=3, block_count=17, max_step_token_count=8)
        worker = FakeWorker(machine, lambda: rng.choice((0.0, 0.01, 0.2)))
        async with running(loop, worker, settings(loss_patience=3.0), seed) as rig:
            made = []
            for index in range(12):
                if rig.fleet.served_model() is not None:
                    prompt = [2 + index, *range(2, 2 + rng.randrange(1, 20))]
                    made.append(
                        (prompt, *submitted(rig, f"r{index}", prompt, rng.randrange(1, 20)))
                    )
                await asyncio.sleep(rng.choice((0.0, 0.05, 0.5)))
                match rng.randrange(8):
                    case 0:
                        worker.break_connection()
                    case 1:
                        worker.kill()
                        await asyncio.sleep(rng.choice((0.5, 5.0)))
                        worker.reachable = True
                    case 2 | 3:
                        name = RequestId(f"r{rng.randrange(index + 1)}")
                        rig.fleet.finish(name, rng.choice(OUTSIDE))
                    case _:
                        pass
            worker.reachable = True
            await rig.settled(*(answer for _, _, answer, _ in made))
            scraped = rig.telemetry.render().decode()
        for prompt, stream, answer, arrival in made:
            account = accounted(stream)
            assert account.usage.prompt_tokens == len(prompt)
            assert account.usage.cached_prompt_tokens <= len(prompt)
            assert account.usage.completion_tokens == len(answer.tokens)
            assert 0 <= account.queue_seconds <= account.seconds <= loop.time() - arrival
            first = account.first_token_seconds
            assert (first is not None) is bool(answer.tokens)
            assert first is None or account.queue_seconds <= first <= account.seconds
            if answer.finish is not None:
                assert account.reason is answer.finish.reason
        for name in ("queue_seconds", "prompt_tokens", "output_tokens"):
            assert f"twinplane_request_{name}_count {float(len(made))}" in scraped

    run_virtual(main)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_end_of_patience_is_told_once_with_its_count(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker, settings(loss_patience=5.0)) as rig:
            answers = [rig.submit(request(f"r{n}", [2, 3, n], 400)) for n in range(count)]
            await asyncio.sleep(0.5)
            worker.kill()
            await asyncio.sleep(60.0)
            await rig.settled(*answers)

    run_virtual(main)
    told = [record for record in caplog.records if record.message == GIVEN_UP]
    assert [record.levelname for record in told] == ["WARNING"] * bool(count)
    for record in told:
        logged = vars(record)["fields"]
        assert (logged["sequence_count"], logged["replica"]) == (count, 0)
        assert logged["lost_seconds"] >= 5.0


@pytest.mark.parametrize("seed", range(20))
def test_at_debug_every_step_is_told(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """The lines add up to the metrics."""
    caplog.set_level(logging.DEBUG, "control_plane.shell")

    async def main(loop: VirtualLoop) -> tuple[str, int]:
        rng = random.Random(seed)
        machine = Machine(max_sequence_count=3, block_count=17, max_step_token_count=8)
        async with running(loop, FakeWorker(machine, lambda: 0.01)) as rig:
            await rig.settled(
                *(
                    rig.submit(request(f"r{n}", list(range(2, 3 + 3 * n)), rng.randrange(1, 20)))
                    for n in range(8)
                )
            )
            await until(lambda: not rig.stats().inflight)
            return rig.telemetry.render().decode(), rig.stats().preemptions

    scraped, preemptions = run_virtual(main)
    planned, finished = (
        [vars(record)["fields"] for record in caplog.records if record.message == message]
        for message in ("step planned", "step finished")
    )
    [count] = re.findall(r'^twinplane_step_tokens_count\{replica="0"\} (\S+)$', scraped, re.M)
    [total] = re.findall(r'^twinplane_step_tokens_sum\{replica="0"\} (\S+)$', scraped, re.M)
    assert len(planned) == float(count) > 0
    assert sum(line["token_count"] for line in planned) == float(total)
    assert all(1 <= line["row_count"] <= line["token_count"] <= 8 for line in planned)
    assert planned[-1]["preemptions"] == preemptions
    assert sum(line["ended_count"] for line in finished) == 8


def test_at_info_no_step_is_formatted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "control_plane")

    def never(*_: object) -> None:
        raise AssertionError("formatted for nobody")

    for name in ("log_plan", "log_result"):
        monkeypatch.setattr(pipeline, name, never)

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 0.01)) as rig:
            await rig.settled(rig.submit(request("a", [2, 3], 10)))

    run_virtual(main)


def test_the_line_of_an_attached_worker_says_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "control_plane.shell")

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(block_count=17))) as rig:
            pool = rig.stats()
            [line] = [
                vars(record)["fields"]
                for record in caplog.records
                if record.message == "worker attached"
            ]
            free = pool.kv_free_tokens
            assert line["kv_token_count"] == free
            assert line["full_length_sequence_count"] == free // line["max_sequence_token_count"]

    run_virtual(main)


@pytest.mark.parametrize("seed", range(60))
def test_capacity_is_what_whole_blocks_hold(seed: int) -> None:
    rng = random.Random(seed)
    size, blocks, rows = rng.randrange(1, 33), rng.randrange(2, 400), rng.randrange(1, 20)
    length = rng.randrange(2, max(3, (blocks - 1) * size + 1))
    if length > (blocks - 1) * size:
        length, blocks = 2, 2 + 2
    capacity = capacity_of(SchedulerConfig(rows, 64, length, blocks, size))
    count, left = 0, blocks - 1
    while left * size >= length and count < rows:
        left -= -(-length // size)
        count += left >= 0
    assert capacity.full_length_sequence_count == count >= 1
    assert capacity.kv_token_count == (blocks - 1) * size
    assert (capacity.max_sequence_token_count, capacity.max_sequence_count) == (length, rows)

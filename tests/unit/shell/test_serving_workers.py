"""What is told of each worker: whether it is there, since when it is away, what room it has."""

from __future__ import annotations

import asyncio

from control_plane.core.events import FinishReason
from control_plane.core.request import RequestId
from control_plane.shell.workers import ServingWorker, WorkerState
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]
KV_TOKENS = 32 * 4  # the null block is nobody's


def test_before_the_first_claim_a_worker_is_awaited() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        async with running(loop, worker) as rig:
            fresh = type(rig)(loop, [worker], settings(), 0)
            assert fresh.serving() == [ServingWorker(WorkerState.AWAITED, reason="it was listed")]

    run_virtual(main)


def test_room_is_taken_and_comes_back() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 0.01)) as rig:
            [idle] = rig.serving()
            assert idle.state is WorkerState.ATTACHED
            assert (idle.kv_token_count, idle.free_kv_token_count) == (KV_TOKENS, KV_TOKENS)
            assert (idle.max_sequence_count, idle.away_seconds) == (4, 0.0)
            neighbour = rig.submit(request("n", PROMPT, 12, seed=1))
            leaving = [rig.submit(request(f"r{n}", PROMPT, 20, seed=n)) for n in range(5)]
            await until(lambda: len(neighbour.tokens) >= 3)
            [busy] = rig.serving()
            assert busy.kv_token_count == KV_TOKENS
            assert busy.free_kv_token_count < KV_TOKENS
            assert busy.running_sequence_count + busy.waiting_sequence_count == 6
            assert 0 < busy.running_sequence_count <= 4
            for n in range(5):
                rig.fleet.finish(RequestId(f"r{n}"), FinishReason.CANCELLED)
            await rig.settled(neighbour, *leaving)
            await until(lambda: rig.stats().inflight == 0)
            assert rig.serving() == [idle]

    run_virtual(main)


def test_a_worker_that_is_away_keeps_its_name_and_has_no_room() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker, settings(loss_patience=30.0)) as rig:
            answer = rig.submit(request("a", PROMPT, 30))
            await until(lambda: len(answer.tokens) >= 3)
            [before] = rig.serving()
            worker.reachable = False
            worker.break_connection()
            await until(lambda: not rig.fleet.ready)
            await asyncio.sleep(12.0)
            [away] = rig.serving()
            assert away.state is WorkerState.AWAY
            assert 12.0 <= away.away_seconds < 13.0
            assert (away.worker_id, away.device) == (before.worker_id, before.device)
            assert (away.kv_token_count, away.free_kv_token_count) == (0, 0)
            assert away.max_sequence_count == before.max_sequence_count
            assert (away.running_sequence_count, away.waiting_sequence_count) == (0, 1)
            await rig.settled(answer)
            assert rig.serving()[0].waiting_sequence_count == 0, "its patience is over"
            worker.reachable = True
            await rig.attached()
            [back] = rig.serving()
            assert back.state is WorkerState.ATTACHED
            assert (back.kv_token_count, back.free_kv_token_count) == (KV_TOKENS, KV_TOKENS)

    run_virtual(main)


def test_each_of_two_is_told() -> None:
    async def main(loop: VirtualLoop) -> None:
        lost, kept = FakeWorker(Machine()), FakeWorker(Machine())
        async with running(loop, [lost, kept]) as rig:
            lost.reachable = False
            lost.break_connection()
            await asyncio.sleep(5.0)
            states = [worker.state for worker in rig.serving()]
            assert states == [WorkerState.AWAY, WorkerState.ATTACHED]

    run_virtual(main)

"""A thousand adapters, sixteen slots and Zipf's law, in virtual time: who waits, and how long."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import accumulate

from control_plane.core.request import Adapter
from tests.simulation.rig import Answer, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import examples
from tests.support.slot_worker import SlotMachine, SlotWorker, expected, files_at

ADAPTERS = 1_000
SLOTS = 16
ROWS = 32
COUNT = 16
PROMPT = [2, 3, 4, 5, 6, 7, 8, 9]
STEP_SECONDS = 0.01
LOAD_SECONDS = 0.05
REQUESTS_PER_SECOND = 60.0


def test_nobody_starves_and_nobody_gets_a_wrong_adapters_token() -> None:
    seconds = examples(40)
    waits: list[float] = []
    hits: list[float] = []

    async def main(loop: VirtualLoop) -> None:
        chance = random.Random(11)
        machine = SlotMachine(
            slot_count=SLOTS,
            max_sequence_count=ROWS,
            max_step_token_count=256,
            block_count=ROWS * 8 + 1,
        )
        worker = SlotWorker(machine, lambda: STEP_SECONDS, LOAD_SECONDS)
        async with running(loop, worker, settings()) as rig:
            adapters: list[Adapter] = [
                rig.fleet.adapters.add(f"a{number}", files_at(f"a{number}")).adapter
                for number in range(ADAPTERS)
            ]
            weights = list(accumulate(1.0 / (rank + 1) for rank in range(ADAPTERS)))

            async def ask(number: int, adapter: Adapter) -> None:
                began = loop.time()
                asked = request(f"r{number}", PROMPT, COUNT, arrival=began, seed=number)
                answer: Answer = rig.submit(replace(asked, adapter=adapter))
                await until(lambda: bool(answer.tokens or answer.end_count))
                waits.append(loop.time() - began)
                await rig.settled(answer)
                assert answer.tokens == expected(PROMPT, COUNT, adapter.digest, number)

            async with asyncio.TaskGroup() as group:
                number = 0
                until_when = loop.time() + seconds
                while loop.time() < until_when:
                    [adapter] = chance.choices(adapters, cum_weights=weights)
                    group.create_task(ask(number, adapter))
                    number += 1
                    await asyncio.sleep(chance.expovariate(REQUESTS_PER_SECOND))
            stats = rig.stats()
            hits.append(stats.adapter_hits / stats.submitted)
            assert stats.adapter_hits + stats.adapter_waits == stats.submitted == number
            assert not (stats.running or stats.waiting or stats.kv_active_tokens)

    run_virtual(main)
    waits.sort()
    p50, p99 = waits[len(waits) // 2], waits[len(waits) * 99 // 100]
    print(
        f"{len(waits)} requests in {seconds} s: hit rate {hits[0]:.2f}, first token after "
        f"{p50:.2f} s (p50), {p99:.2f} s (p99), {waits[-1]:.2f} s (most)"
    )
    assert hits[0] > 0.2
    assert waits[-1] < 60.0, "somebody starves"

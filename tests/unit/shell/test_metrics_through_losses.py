"""What a scrape shows while workers come, go, freeze and change: counters only grow, no series
vanishes, and nobody claims room that is not there."""

from __future__ import annotations

import asyncio
import random
import re

import pytest

from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

GROWS = re.compile(r"_(total|count|sum|bucket)$")


def scrape(rig: Rig) -> dict[str, float]:
    """Our samples by name and labels; `worker_info` without what names the worker."""
    text = rig.telemetry.render().decode()
    pairs = re.findall(r"^(twinplane_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {
        re.sub(r'(worker_id|model|device)="[^"]*"', r"\1", name): float(value)
        for name, value in pairs
    }


def check(before: dict[str, float], after: dict[str, float], *, attached: bool) -> None:
    assert before.keys() <= after.keys(), "a series has vanished"
    for name, value in before.items():
        if GROWS.search(name.partition("{")[0]):
            assert after[name] >= value, name
    room = {name: value for name, value in after.items() if "kv_tokens" in name}
    assert bool(sum(room.values())) is attached, room
    assert after['twinplane_worker_up{replica="0"}'] == attached
    assert after['twinplane_worker_info{device,model,replica="0",worker_id}'] == attached
    assert attached or after['twinplane_steps_in_flight{replica="0"}'] == 0


async def strike(worker: FakeWorker, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            worker.break_connection()
        case 1:
            worker.kill()
        case 2:
            worker.reachable = True
            worker.thaw()
        case 3:
            worker.freeze()
        case 4:
            worker.kill()
            worker.machine.digest = rng.choice("abc") * 64
            worker.machine.vocabulary_size = rng.choice((97, 98))
            worker.reachable = True
        case 5:
            worker.machine.claim(worker.machine.epoch + 1)


@pytest.mark.parametrize("seed", spread(range(60), 15))
def test_counters_only_grow_and_room_is_real(seed: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        worker = FakeWorker(Machine(), lambda: 0.1)
        chosen = settings(loss_patience=8.0, contention_delay=1.0)
        async with running(loop, worker, chosen, seed) as rig:
            last = scrape(rig)
            for index in range(25):
                if rig.fleet.served_model() is not None:
                    rig.submit(request(f"r{index}", [2, 3, index], rng.randrange(1, 30)))
                await asyncio.sleep(rng.choice((0.0, 0.3, 1.0, 5.0)))
                if rng.random() < 0.5:
                    await strike(worker, rng)
                now = scrape(rig)
                check(last, now, attached=rig.fleet.replicas[0].attached)
                last = now
            worker.reachable = True
            worker.thaw()

    run_virtual(main)

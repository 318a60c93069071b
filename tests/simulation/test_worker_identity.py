"""Which worker is which: ids that move, addresses that are one, and models that do not fit."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.simulation.joining import World, metric, run, told
from tests.simulation.rig import until


def test_a_worker_under_two_addresses_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main(made: World) -> None:
        machine = made.network.machines["a"]
        made.network.machines["alias"] = machine
        made.submit(4)
        await made.under_way()
        await made.lists("a", "b", "alias")
        await asyncio.sleep(300.0)
        await made.settled()
        assert machine.epoch == 1, "the second address has claimed it"
        alias = made.at("alias")
        assert alias.state.value == "joining"
        assert alias.life.reason == "worker 'worker at a' is here already, as replica 0"
        refusals = [one for one in told(caplog, "no worker") if one["replica"] == alias.number]
        assert len(refusals) == 1, "it is told once, whatever time passes"
        # Once the first address is gone, the other is the one.
        await made.lists("b", "alias")
        await made.attached("alias")
        made.submit(4)
        await made.settled()
        assert machine.epoch == 2

    run(main, "a", "b")


def test_two_addresses_that_come_at_once_do_not_fight() -> None:
    async def main(made: World) -> None:
        machine = made.network.add("x", "twice")
        made.network.machines["y"] = machine
        await made.lists("a", "x", "y")
        await until(lambda: made.at("x").attached or made.at("y").attached)
        await asyncio.sleep(60.0)
        assert machine.epoch == 1
        made.submit(5)

    run(main, "a")


@pytest.mark.parametrize("still_listed", [True, False])
@pytest.mark.parametrize("notices", [True, False])
def test_a_worker_that_comes_back_elsewhere_takes_its_sequences(
    still_listed: bool, notices: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Alone, so that nobody else can have them. `notices`: the loss was seen before."""
    caplog.set_level(logging.INFO)

    async def main(made: World) -> None:
        made.submit(4)
        await made.under_way()
        old = made.at("a")
        (port,) = made.network.ports["a"]
        if notices:
            made.network.kill("a")
            await until(lambda: not old.attached)
        else:
            made.network.machines.pop("a")
            port.freeze()  # its machine is gone, and the connection looks whole
        made.network.add("new", "worker at a").incarnation = 2
        await made.lists(*(("a",) if still_listed else ()), "new")
        before = made.rig.loop.time()
        await made.attached("new")
        await until(lambda: not old.attached and not (old.stats() or old).running)
        assert made.rig.loop.time() - before < 0.2, "they wait for a grace, or a heartbeat"
        await made.settled()
        if still_listed:
            assert old.life.is_replaced
            assert metric(made.rig, "sequence_moves_total", cause="replaced", direction="in") == 4.0
        made.submit(2)

    run(main, "a")


def test_of_two_workers_with_one_id_one_is_used(caplog: pytest.LogCaptureFixture) -> None:
    """Neither takes the other's place again and again."""
    caplog.set_level(logging.INFO)

    async def main(made: World) -> None:
        other = made.network.add("x", "worker at a")
        other.incarnation = 7
        made.submit(4)
        await made.under_way()
        await made.lists("a", "b", "x")
        await made.attached("x")
        await asyncio.sleep(600.0)
        assert not made.at("a").attached
        assert "another worker has its id 'worker at a'" in made.at("a").life.reason
        assert (made.network.machines["a"].epoch, other.epoch) == (1, 1)
        warned = [
            record
            for record in caplog.records
            if record.levelname == "WARNING" and "another worker" in str(record.__dict__["fields"])
        ]
        assert 1 <= len(warned) <= 12, "once a minute"
        # The first is used again when the second is gone.
        made.network.kill("x")
        await made.attached("a")
        made.submit(3)

    run(main, "a", "b")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "b" * 64}, "its weights are not those of replica 0, which serves"),
        ({"vocabulary_size": 50}, "its vocabulary is not that of replica 0, which serves"),
    ],
)
def test_another_model_is_refused_before_it_is_claimed(
    changes: dict[str, Any], reason: str
) -> None:
    async def main(made: World) -> None:
        machine = made.network.add("x", "other", **changes)
        await made.lists("a", "x")
        await asyncio.sleep(10.0)
        assert machine.epoch == 0, "claimed, though it can't be used"
        assert made.at("x").life.reason == reason
        assert made.rig.serving()[1].reason == reason
        made.submit(4)
        await made.settled()
        # It serves once nobody serves something else.
        await made.lists("x")
        await made.attached("x")
        assert machine.epoch == 1

    run(main, "a")


def test_smaller_limits_are_used_for_what_they_can_do() -> None:
    async def main(made: World) -> None:
        made.network.add(
            "x", "small", max_sequence_token_count=16, max_sequence_count=1, block_count=9
        )
        await made.lists("a", "x")
        await made.attached("x")
        made.submit(6, max_tokens=8)
        made.submit(3, max_tokens=40)
        await made.settled()
        small = made.network.machines["x"].executed_plans
        assert small and all(len(added.token_ids) < 16 for plan in small for added in plan.added)

    run(main, "a")

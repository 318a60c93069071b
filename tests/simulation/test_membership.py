"""Workers that join and leave under streams, in virtual time, and what is told of it."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from control_plane.core.claim import ClaimPolicy
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.worker_lists import ListUnusable
from tests.simulation.joining import Network, World, metric, run, told, world
from tests.simulation.rig import settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread


def test_one_that_leaves_gives_away_what_it_has() -> None:
    async def main(made: World) -> None:
        made.submit(6)
        await made.under_way()
        leaving = made.at("a")
        moved = leaving.stats()
        assert moved is not None and moved.running
        await made.lists("b")
        assert leaving.state.value == "draining"
        assert metric(made.rig, "sequence_moves_total", cause="draining", direction="in") == 3.0
        await until(lambda: leaving not in made.replicas())
        assert not made.network.ports["a"][0].connected, "its worker is let go"
        await made.settled()
        assert metric(made.rig, "resume_pause_seconds_count") == 3.0
        assert metric(made.rig, "worker_losses_total") == 0.0
        assert made.rig.readiness == [True]

    run(main, "a", "b")


def test_the_only_one_that_leaves_finishes_what_it_has() -> None:
    async def main(made: World) -> None:
        made.submit(3)
        await made.under_way()
        made.network.add("b", "late")
        made.network.listed = ("b",)
        made.network.machines.pop("b")  # nobody is there yet
        await made.members.look(made.network)
        await made.settled()
        made.network.add("b", "late")
        await made.attached("b")
        assert [replica.life.address for replica in made.replicas()] == ["b"]
        made.submit(2)

    run(main, "a")


def test_one_that_joins_takes_what_waits() -> None:
    async def main(made: World) -> None:
        made.submit(9)
        made.network.add("b", "second")
        await made.lists("a", "b")
        await made.attached("b")
        await made.settled()
        assert made.network.machines["b"].executed_plans
        assert metric(made.rig, "sequence_moves_total", cause="relief", direction="out") > 0

    run(main, "a")


def test_an_address_that_comes_back_while_it_leaves_joins_anew() -> None:
    """Of the only worker: its new replica takes it over from the old one, with its streams."""

    async def main(made: World) -> None:
        made.submit(3)
        await made.under_way()
        old = made.at("a")
        await made.lists("z")  # nobody is there
        assert old.state.value == "draining" and old in made.replicas()
        await made.lists("a")
        new = made.at("a")
        assert new is not old
        await made.attached("a")
        await until(lambda: old not in made.replicas())
        assert new.attached
        made.submit(2)
        await made.settled()
        assert made.network.machines["a"].epoch <= 3, "a claim fight"

    run(main, "a")


def test_one_that_is_lost_and_no_longer_listed_goes_at_once() -> None:
    async def main(made: World) -> None:
        made.network.kill("a")
        await until(lambda: not made.at("a").attached)
        lost = made.at("a")
        before = made.rig.loop.time()
        await made.lists("b")
        await until(lambda: lost not in made.replicas())
        assert made.rig.loop.time() - before < 0.1
        made.submit(2)

    run(main, "a", "b")


def test_one_that_was_never_there_goes_at_once() -> None:
    async def main(made: World) -> None:
        await made.lists("a", "nobody")
        await asyncio.sleep(1.0)
        await made.lists("a")
        await asyncio.sleep(0.01)
        assert [replica.life.address for replica in made.replicas()] == ["a"]
        made.submit(1)

    run(main, "a")


def test_a_worker_that_is_contested_leaves_without_waiting_for_its_next_attempt() -> None:
    async def main(made: World) -> None:
        machine = made.network.machines["a"]
        machine.claim(machine.epoch + 1)  # another control plane
        made.submit(4)
        await until(lambda: not made.at("a").attached)
        contested = made.at("a")
        before = made.rig.loop.time()
        await made.lists("b")
        await until(lambda: contested not in made.replicas())
        assert made.rig.loop.time() - before < 1.0, "it waits for ten seconds"

    run(main, "a", "b")


# --- what is told ------------------------------------------------------------------------------


def test_each_change_of_state_is_told_once_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def main(made: World) -> None:
        replica = made.at("a")
        machine = made.network.machines["a"]
        made.network.kill("a")
        await until(lambda: not replica.attached)
        assert metric(made.rig, "replica_state", state="lost", replica="0") == 1.0
        assert metric(made.rig, "worker_losses_total", cause="unreachable", replica="0") == 1.0
        await asyncio.sleep(20.0)
        assert metric(made.rig, "replica_state", state="gone", worker_id="worker at a") == 1.0
        machine.restart()
        made.network.machines["a"] = machine
        await made.attached("a")
        assert metric(made.rig, "replica_state") == 2.0, "each is in one state"
        await made.lists("b")
        await until(lambda: replica not in made.replicas())
        changes = [
            (one["before"], one["now"], one["reason"])
            for one in told(caplog, "replica changed state")
            if one["replica"] == 0
        ]
        assert changes == [
            ("", "joining", "it was listed"),
            ("joining", "attached", "its worker was claimed"),
            ("attached", "lost", "connection broken"),
            ("lost", "gone", "unreachable"),
            ("gone", "attached", "its worker was claimed"),
            ("attached", "draining", "it is no longer listed"),
            ("draining", "gone", "it has left"),
        ]
        made.submit(1)

    run(main, "a", "b", chosen=settings(loss_patience=10.0))


def test_a_pause_lasts_from_the_loss_to_the_next_token() -> None:
    async def main(made: World) -> None:
        made.submit(8, max_tokens=50)
        await made.under_way()
        made.network.kill("a")
        await made.settled()
        count = metric(made.rig, "resume_pause_seconds_count")
        total = metric(made.rig, "resume_pause_seconds_sum")
        assert count == 4.0, "those that ran, once each"
        assert 0.25 <= total / count <= 1.0, "a grace, and the recomputed prompt"
        assert metric(made.rig, "sequence_moves_total", direction="out", replica="0") == 4.0
        assert metric(made.rig, "sequence_moves_total", direction="in", replica="1") == 4.0

    run(main, "a", "b")


# --- everything at once ------------------------------------------------------------------------


@pytest.mark.parametrize("seed", spread(range(50), 8))
def test_whatever_joins_and_leaves_no_token_changes(seed: int) -> None:
    rng = random.Random(seed)
    addresses = [f"h{number}" for number in range(6)]

    async def main(loop: VirtualLoop) -> None:
        network = Network()
        lives = 0

        def start(address: str) -> None:
            nonlocal lives
            lives += 1
            # A worker keeps its id; some come back elsewhere.
            name = f"worker {rng.randrange(6)}"
            taken = {machine.name for machine in network.machines.values()}
            if name not in taken:
                network.add(address, name).incarnation = lives

        start("h0")
        chosen = ReplicaSettings(
            scheduling=SchedulingSettings(async_scheduling=bool(seed % 2)),
            claim=ClaimPolicy(loss_patience=600.0),
            check_invariants=True,
        )
        async with world(loop, network, chosen) as made:
            await made.lists("h0")
            await made.attached("h0")
            for _ in range(40):
                match rng.randrange(6):
                    case 0:
                        start(rng.choice(addresses))
                    case 1:
                        victim = rng.choice(addresses)
                        if victim in network.machines:
                            network.kill(victim)
                    case 2 | 3:
                        await made.lists(*rng.sample(addresses, rng.randint(1, 6)))
                    case 4:
                        network.listed = ListUnusable("a failing lookup")
                        await made.members.look(network)
                    case _:
                        if made.rig.fleet.ready:
                            made.submit(rng.randint(1, 4), rng.randint(1, 50))
                await asyncio.sleep(rng.choice((0.0, 0.005, 0.05, 0.5)))
            for number, address in enumerate(addresses):  # heal
                network.kill(address) if address in network.machines else None
                network.add(address, f"worker {number}").incarnation = lives + number + 1
            await made.lists(*addresses)
            await made.settled()

    run_virtual(main)


def test_256_joined_and_idle_cost_what_they_should() -> None:
    """Attempts and looks grow with the number of replicas, and not faster."""

    def joined_and_left(count: int) -> int:
        turns = 0

        async def main(loop: VirtualLoop) -> None:
            nonlocal turns
            network = Network()
            addresses = [f"h{number}" for number in range(count)]
            for address in addresses:
                network.add(address, address)
            async with world(loop, network) as made:
                handle = loop._run_once  # type: ignore[attr-defined]

                def counted() -> None:
                    nonlocal turns
                    turns += len(loop._ready)  # type: ignore[attr-defined]
                    handle()

                loop._run_once = counted  # type: ignore[attr-defined]
                await made.lists(*addresses)
                await made.attached(*addresses)
                await made.lists(addresses[0])
                await until(lambda: len(made.replicas()) == 1)

        run_virtual(main)
        return turns

    few, many = joined_and_left(64), joined_and_left(256)
    assert many <= 5 * few

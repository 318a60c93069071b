"""Adapters of a fleet's replicas, in virtual time: loaded when asked for, and never mixed up."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.request import Adapter
from control_plane.shell.adapter_registry import AdapterRefused, AdapterUnknown
from control_plane.shell.engine import AdapterUnavailable
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.slot_worker import SlotMachine, SlotWorker, expected, files_at

PROMPT = [2, 3, 4, 5, 6, 7, 8, 9, 10]
COUNT = 8


def worker(slots: int = 2, load_seconds: float = 0.02) -> SlotWorker:
    machine = SlotMachine(slot_count=slots, block_count=200, max_step_token_count=64)
    return SlotWorker(machine, lambda: 0.01, load_seconds)


def register(rig: Rig, *names: str) -> dict[str, Adapter]:
    return {name: rig.fleet.adapters.add(name, files_at(name)).adapter for name in names}


def ask(rig: Rig, name: str, adapter: Adapter | None, seed: int = 0) -> Answer:
    asked = request(name, PROMPT, COUNT, arrival=rig.loop.time(), seed=seed)
    return rig.submit(replace(asked, adapter=adapter))


def nothing_is_held(rig: Rig) -> None:
    for number in range(len(rig.workers)):
        stats = rig.stats(number)
        assert not (stats.running or stats.waiting or stats.kv_active_tokens)
        slots = rig.core(number).ledger.adapters
        assert not slots.queues and not any(slot.user_count for slot in slots.slots)


def test_each_gets_its_own_adapters_tokens() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker()) as rig:
            adapters = register(rig, "a", "b", "c", "d")
            asked = [None, *adapters.values()] * 3
            answers = [ask(rig, f"r{n}", adapter) for n, adapter in enumerate(asked)]
            await rig.settled(*answers)
            for adapter, answer in zip(asked, answers, strict=True):
                digest = "" if adapter is None else adapter.digest
                assert answer.tokens == expected(PROMPT, COUNT, digest), answer.error
            stats = rig.stats()
            assert stats.adapter_loads >= 4 and stats.adapter_evictions == stats.adapter_loads - 2
            assert stats.adapter_hits + stats.adapter_waits == 12
            nothing_is_held(rig)

    run_virtual(main)


def test_a_neighbour_does_not_notice_that_an_adapter_is_loaded() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker(load_seconds=5.0)) as rig:
            adapters = register(rig, "a")
            waits, passes = ask(rig, "waits", adapters["a"]), ask(rig, "passes", None)
            await rig.settled(passes)
            assert loop.time() < 1.0 and not waits.tokens
            await rig.settled(waits)
            assert waits.tokens == expected(PROMPT, COUNT, adapters["a"].digest)

    run_virtual(main)


def test_a_new_adapter_under_an_old_name_is_a_new_one() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker(slots=1)) as rig:
            registry = rig.fleet.adapters
            before = register(rig, "a")["a"]
            old = ask(rig, "old", before)
            await until(lambda: len(old.tokens) > 2)
            now = registry.add("a", files_at("elsewhere")).adapter
            assert now.digest != before.digest and registry.named("a").adapter == now
            rig.workers[0].kill()
            rig.workers[0].reachable = True
            new = ask(rig, "new", now)
            await rig.settled(old, new)
            assert old.tokens == expected(PROMPT, COUNT, before.digest)
            assert new.tokens == expected(PROMPT, COUNT, now.digest)
            registry.unregister("a")
            with pytest.raises(AdapterUnknown):
                registry.named("a")

    run_virtual(main)


def test_what_cannot_be_loaded_ends_those_that_want_it_and_says_why() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker()) as rig:
            adapters = register(rig, "bad", "good")
            bad, good = ask(rig, "r1", adapters["bad"]), ask(rig, "r2", adapters["good"])
            await rig.settled(bad, good)
            assert bad.finish is not None
            assert bad.finish.reason is FinishReason.ADAPTER_UNAVAILABLE
            assert "'bad'" in bad.finish.detail and "don't fit" in bad.finish.detail
            assert good.tokens == expected(PROMPT, COUNT, adapters["good"].digest)
            nothing_is_held(rig)

    run_virtual(main)


def test_a_replica_without_slots_is_never_asked() -> None:
    async def main(loop: VirtualLoop) -> None:
        plain = FakeWorker(Machine(block_count=200), lambda: 0.01)
        async with running(loop, [plain, worker()]) as rig:
            adapters = register(rig, "a")
            answers = [ask(rig, f"r{n}", adapters["a"]) for n in range(6)]
            await rig.settled(*answers)
            for answer in answers:
                assert answer.tokens == expected(PROMPT, COUNT, adapters["a"].digest)
            assert rig.stats(0).submitted == 0
        async with running(loop, FakeWorker(Machine(block_count=200))) as rig:
            with pytest.raises(AdapterUnavailable, match="--max-loras"):
                ask(rig, "r", Adapter("a", "a"))

    run_virtual(main)


def test_requests_go_where_their_adapter_is() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [worker(), worker()]) as rig:
            adapters = register(rig, "a", "b")
            await rig.settled(ask(rig, "1", adapters["a"]))
            await rig.settled(ask(rig, "2", adapters["b"]))
            for number in range(3, 12):
                await rig.settled(ask(rig, str(number), adapters["ab"[number % 2]]))
            assert sum(rig.stats(number).adapter_loads for number in (0, 1)) == 2

    run_virtual(main)


def test_nobody_waits_for_a_full_replica_when_another_has_a_slot() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [worker(slots=1), worker(slots=1)]) as rig:
            adapters = register(rig, "a", "b")
            first = rig.submit(replace(request("long", PROMPT, 50, seed=1), adapter=adapters["a"]))
            await until(lambda: bool(first.tokens))
            second = ask(rig, "second", adapters["b"])
            await rig.settled(second)
            assert len(first.tokens) < 50
            assert [rig.stats(n).adapter_loads for n in (0, 1)] == [1, 1]
            await rig.settled(first)

    run_virtual(main)


@pytest.mark.parametrize("kind", ["restart", "reconnect", "leave"])
def test_a_lost_worker_changes_no_token(kind: str) -> None:
    """Adapters survive a connection, not a life; what runs has its own again either way."""

    async def main(loop: VirtualLoop) -> None:
        workers = [worker(), worker()] if kind == "leave" else [worker()]
        async with running(loop, workers) as rig:
            adapters = register(rig, "a", "b", "c")
            asked = [None, *adapters.values()] * 2
            answers = [ask(rig, f"r{n}", adapter, n) for n, adapter in enumerate(asked)]
            for _ in range(3):
                await asyncio.sleep(0.07)
                match kind:
                    case "restart":
                        workers[0].kill()
                        workers[0].reachable = True
                    case "reconnect":
                        workers[0].break_connection()
                    case _:
                        workers[0].kill()
            await rig.settled(*answers)
            for number, (adapter, answer) in enumerate(zip(asked, answers, strict=True)):
                digest = "" if adapter is None else adapter.digest
                assert answer.tokens == expected(PROMPT, COUNT, digest, number), answer.error

    run_virtual(main)


@pytest.mark.parametrize("seed", range(20))
def test_under_churn_every_output_is_its_adapters_own(seed: int) -> None:
    """Adapters come, change and go, are pinned and let loose, and workers fail."""

    async def main(loop: VirtualLoop) -> None:
        chance = random.Random(seed)
        workers = [worker(slots=chance.randint(1, 3), load_seconds=0.03) for _ in range(2)]
        async with running(loop, workers, settings()) as rig:
            registry = rig.fleet.adapters
            adapters = register(rig, *"abcdef")
            told: list[tuple[str, int, Answer]] = []
            for number in range(60):
                name = chance.choice("abcdef")
                if chance.random() < 0.1:
                    folder = f"{name} {number}"
                    adapters[name] = registry.add(name, files_at(folder)).adapter
                if chance.random() < 0.1:
                    registry.pin(name, is_pinned=chance.random() < 0.5)
                if chance.random() < 0.05:
                    chance.choice(workers).break_connection()
                adapter = adapters[name] if chance.random() < 0.8 else None
                answer = ask(rig, f"r{number}", adapter, number)
                told.append(("" if adapter is None else adapter.digest, number, answer))
                await asyncio.sleep(chance.random() * 0.05)
            await rig.settled(*(answer for _, _, answer in told))
            for digest, number, answer in told:
                assert answer.tokens == expected(PROMPT, COUNT, digest, number), answer.error
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a=b", "-a", "ä", "a" * 129, "a\n"])
def test_names_that_are_none(name: str) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker()) as rig:
            with pytest.raises(AdapterRefused):
                register(rig, name)
            assert rig.fleet.adapters.count == 0

    run_virtual(main)

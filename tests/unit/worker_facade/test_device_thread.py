"""Work is launched ahead of its collection where the device computes by itself, and in order."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest

from worker_service.device_thread import DeviceThread

PATIENCE = 10.0


@dataclass(eq=False)
class Step:
    """Work that the test finishes, as a device would."""

    name: str
    log: list[str]
    failing: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    launched: threading.Event = field(default_factory=threading.Event)

    def launch(self) -> Step:
        self.log.append(f"launch {self.name}")
        self.launched.set()
        return self

    def is_ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> str:
        assert self.done.wait(PATIENCE)
        self.log.append(f"collect {self.name}")
        if self.failing:
            raise ValueError(self.name)
        return self.name


async def launched(step: Step) -> None:
    assert await asyncio.to_thread(step.launched.wait, PATIENCE)


async def test_the_next_step_is_launched_before_the_last_is_collected() -> None:
    log: list[str] = []
    first, second = Step("1", log), Step("2", log)
    thread = DeviceThread()
    outcomes = [thread.start_pending(step.launch) for step in (first, second)]
    await launched(second)
    assert log == ["launch 1", "launch 2"]
    second.done.set()
    first.done.set()
    assert await asyncio.gather(*outcomes) == ["1", "2"]
    assert log == ["launch 1", "launch 2", "collect 1", "collect 2"]
    await thread.close()


async def test_a_step_that_is_ready_at_launch_is_collected_at_once() -> None:
    """As on the CPU: its tokens do not wait for the step behind it."""
    log: list[str] = []
    first, second = Step("1", log), Step("2", log)
    first.done.set()
    second.done.set()
    thread = DeviceThread()
    gate = threading.Event()
    held = thread.start(lambda: gate.wait(PATIENCE))
    outcomes = [thread.start_pending(step.launch) for step in (first, second)]
    gate.set()
    assert await held
    assert await asyncio.gather(*outcomes) == ["1", "2"]
    assert log == ["launch 1", "collect 1", "launch 2", "collect 2"]
    await thread.close()


async def test_a_step_that_fails_fails_alone() -> None:
    log: list[str] = []
    steps = [Step("1", log), Step("2", log, failing=True), Step("3", log)]
    thread = DeviceThread()
    outcomes = [thread.start_pending(step.launch) for step in steps]
    for step in steps:
        step.done.set()
    results = await asyncio.gather(*outcomes, return_exceptions=True)
    assert results[0] == "1" and results[2] == "3"
    assert isinstance(results[1], ValueError)
    await thread.close()


async def test_a_refused_launch_is_told_after_the_steps_before_it() -> None:
    log: list[str] = []
    first = Step("1", log)
    thread = DeviceThread()
    order: list[str] = []

    def refuse() -> Step:
        first.done.set()
        raise KeyError("refused")

    outcome = thread.start_pending(first.launch, finished=lambda: order.append("1"))
    refused = thread.start_pending(refuse, finished=lambda: order.append("refused"))
    with pytest.raises(KeyError):
        await refused
    assert await outcome == "1"
    assert order == ["1", "refused"]
    await thread.close()


async def test_close_waits_for_what_was_launched() -> None:
    log: list[str] = []
    first = Step("1", log)
    thread = DeviceThread()
    outcome = thread.start_pending(first.launch)
    await launched(first)
    closing = asyncio.create_task(thread.close())
    await asyncio.sleep(0)
    assert not closing.done()
    first.done.set()
    await closing
    assert await outcome == "1"

"""Signals and the end of the parent, as both planes see them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from itertools import product

import pytest

from tests.support.planes import plane_environment
from twinplane.process import stop_signals
from twinplane.process.stop_signals import StopSignals

PATIENCE = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def sent(number: signal.Signals, event: asyncio.Event) -> None:
    """Sends the signal to this process and waits until `event` is set."""
    os.kill(os.getpid(), number)
    await asyncio.wait_for(event.wait(), PATIENCE)


@pytest.mark.parametrize(("number", "second"), [*product(SIGNALS, SIGNALS)])
async def test_the_first_signal_and_the_second(
    number: signal.Signals, second: signal.Signals
) -> None:
    with StopSignals(watch_stdin=False) as signals:
        assert not signals.first.is_set()
        await sent(number, signals.first)
        assert signals.reason == number.name
        assert not signals.second.is_set()
        await sent(second, signals.second)
        assert signals.hurried_by is second
        await sent(signal.SIGINT, signals.second)
        assert (signals.reason, signals.hurried_by) == (number.name, second)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(watch_stdin=False) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            await sent(signal.SIGTERM, signals.first)
            assert not signals.second.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_the_end_of_standard_input_is_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, parents = os.pipe()
    monkeypatch.setattr(stop_signals, "_STDIN", ours)
    try:
        with StopSignals(watch_stdin=True) as signals:
            os.write(parents, b"what a parent writes means nothing")
            await asyncio.sleep(0.05)
            assert not signals.first.is_set()
            os.close(parents)
            await asyncio.wait_for(signals.first.wait(), PATIENCE)
            assert signals.reason == "the parent ends"
            assert not signals.second.is_set()
    finally:
        os.close(ours)


@pytest.mark.parametrize("order", ["signal first", "parent first"])
async def test_a_parent_and_a_signal_are_not_two_signals(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A supervisor that was told ends its children's input; the same signal may reach them too."""
    ours, parents = os.pipe()
    monkeypatch.setattr(stop_signals, "_STDIN", ours)
    try:
        with StopSignals(watch_stdin=True) as signals:
            if order == "signal first":
                await sent(signal.SIGTERM, signals.first)
            os.close(parents)
            await asyncio.wait_for(signals.first.wait(), PATIENCE)
            if order == "parent first":
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            assert not signals.second.is_set()
            await sent(signal.SIGTERM, signals.second)
    finally:
        os.close(ours)


STARTING = """
import os, signal, sys
from twinplane.process.starting import end_at_once_when_asked
end_at_once_when_asked()
if sys.argv[2] == "logs":
    from twinplane.process.logs import LogFormat, configure
    configure("info", LogFormat.JSON)
os.kill(os.getpid(), int(sys.argv[1]))
signal.pause()
"""


@pytest.mark.parametrize("logs", ["logs", "no logs"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_anything_runs_ends_the_process_well(
    number: signal.Signals, logs: str
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", STARTING, str(int(number)), logs],
        env=plane_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    [line] = process.stderr.splitlines()
    assert "stopped" in line
    assert f"{number.name} while it started" in line

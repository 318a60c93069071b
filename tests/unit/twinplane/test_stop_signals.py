"""Signals and the end of the parent, as both planes see them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from twinplane.process import stop_signals
from twinplane.process.stop_signals import StopSignals

PATIENCE = 10.0


async def sent(number: signal.Signals, event: asyncio.Event) -> None:
    """Sends the signal to this process and waits until `event` is set."""
    os.kill(os.getpid(), number)
    await asyncio.wait_for(event.wait(), PATIENCE)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_first_signal_and_the_second(number: signal.Signals) -> None:
    with StopSignals(watch_stdin=False) as signals:
        assert not signals.first.is_set()
        await sent(number, signals.first)
        assert not signals.second.is_set()
        await sent(signal.SIGTERM, signals.second)
        await sent(signal.SIGINT, signals.second)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


async def test_without_a_second_the_next_signal_has_its_own_effect() -> None:
    with StopSignals(watch_stdin=False, catch_second=False) as signals:
        await sent(signal.SIGTERM, signals.first)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
            assert not signals.second.is_set()
    finally:
        os.close(ours)

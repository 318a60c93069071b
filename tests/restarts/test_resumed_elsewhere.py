"""Two control planes, each with its own worker: when one ends, its streams go on at the other."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.restarts.__main__ import SIMULATED
from tests.restarts.kills import planes
from twinplane import Client

pytestmark = pytest.mark.slow

SECONDS = 120.0
STREAMS = 6


class Stream:
    """A seeded stream in a thread of its own."""

    def __init__(self, client: Client, seed: int) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.begun = threading.Event()
        self._generation = client.generate("ab", seed=seed, max_tokens=150, ignore_eos=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for delta in self._generation:
            self.tokens += delta.token_ids
            self.text += delta.text
            if len(self.tokens) >= 10:
                self.begun.set()

    def whole(self) -> tuple[list[int], str]:
        """All that it got."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return self.tokens, self.text


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_at_the_next_address(
    tiny_model: Path, tmp_path: Path, how: signal.Signals
) -> None:
    with ExitStack() as stack:
        sites = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            made = planes(tmp_path / name, str(tiny_model), SIMULATED)
            sites.append(stack.enter_context(made))
        client = stack.enter_context(Client("ipv4:" + ",".join(site.address for site in sites)))
        undisturbed = [Stream(client, seed).whole() for seed in range(STREAMS)]
        streams = [Stream(client, seed) for seed in range(STREAMS)]
        assert all(stream.begun.wait(SECONDS) for stream in streams)
        sites[0].control.stop(how)
        assert [stream.whole() for stream in streams] == undisturbed
        sites[1].control.stop()  # and all its lines are written
        assert len(sites[1].brought()) == STREAMS

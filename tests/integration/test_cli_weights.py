"""`twinplane weights`, `pause` and `resume` against `twinplane up`, as people type them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.planes import Plane, free_port, plane_environment
from tests.support.tiny_model import write_tiny_model
from twinplane import Client, WorkerState

pytestmark = pytest.mark.slow

_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"


class Server:
    """`twinplane up` with two workers. `told`: what a command has said on standard error."""

    def __init__(self, folder: Path) -> None:
        model = write_tiny_model(folder / "model")
        self.root = folder / "weights"
        for name in ("a", "b"):
            (self.root / name).mkdir(parents=True)
            (self.root / name / "config.json").write_text(name)
        self.folder, port = folder, free_port()
        self.address, self.admin = f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}"
        self.told = ""
        self.plane = Plane(
            [
                *("up", f"--model={model}", "--simulate", "--data-parallel-size=2"),
                *(f"--port={port}", f"--admin-port={self.admin.rpartition(':')[2]}"),
                *("--metrics-port=none", f"--weights-root={self.root}"),
                f"--state-dir={folder / 'state'}",
            ],
            folder / "up.log",
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """A command's exit code and standard output."""
        ended = subprocess.run(
            [sys.executable, "-c", _CLI, *arguments],
            env=plane_environment(TWINPLANE_ADMIN_ADDRESS=self.admin),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.told = ended.stderr
        return ended.returncode, ended.stdout

    def wait_until_whole(self) -> None:
        """It serves as soon as one of its two workers is there; waits for the other."""
        deadline = time.monotonic() + 60
        with Client(self.address) as client:
            while {each.state for each in client.list_workers()} != {WorkerState.ATTACHED}:
                assert time.monotonic() < deadline, self.plane.log_end()
                time.sleep(0.05)

    def made_by(self) -> str:
        """The weights that answer."""
        with Client(self.address) as client:
            return client.complete("hello", max_tokens=3).weights_spans[-1].weights_name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    try:
        made.plane.wait_until_serving(made.address)
        made.wait_until_whole()
        yield made
    finally:
        assert made.plane.stop(signal.SIGTERM) == 0


def test_a_day_of_an_operator(server: Server) -> None:
    code, out = server.run("weights", "status")
    assert code == 0
    assert "none yet" in out
    assert out.count("current") == 2

    code, _ = server.run("weights", "update", str(server.root / "a"), "--name=step-1")
    assert code == 0, server.told
    assert server.told.splitlines()[-1] == "step-1: done"
    assert server.made_by() == "step-1"

    flags = ("--strategy=all-at-once", "--in-flight=keep-kv", "--placement=beside")
    code, _ = server.run("weights", "update", "b", "--name=step-2", *flags)
    assert code == 0, server.told
    assert server.made_by() == "step-2"

    code, out = server.run("weights", "status", "--json")
    state = json.loads(out)
    assert code == 0
    assert state["rollout"]["state"] == "ROLLOUT_STATE_DONE"
    assert state["rollout"]["in_flight"] == "IN_FLIGHT_POLICY_KEEP_KV"
    assert [each["name"] for each in state["replicas"]] == ["step-2"] * 2

    code, _ = server.run("weights", "rollback")
    assert code == 0, server.told
    assert server.made_by() == "step-1"

    streamed = server.folder / "streamed"
    streamed.mkdir()
    for number in (1, 2):
        values = torch.arange(number * 300_000, dtype=torch.float32)
        save_file(
            {f"t{number}": values, f"e{number}": values[:0]}, streamed / f"{number}.safetensors"
        )
    code, _ = server.run("weights", "update", "streamed", "--name=sent", "--stream")
    assert code == 0, server.told
    assert server.made_by() == "sent"
    (streamed / "3.safetensors").write_bytes(b"none")
    code, _ = server.run("weights", "update", "streamed", "--name=worse", "--stream")
    assert code == 1
    assert "3.safetensors is no safetensors file" in server.told
    code, _ = server.run("weights", "rollback")
    assert code == 0, server.told
    assert server.made_by() == "step-1"

    code, _ = server.run("weights", "update", "nothing", "--name=step-3")
    assert code == 1
    assert "step-3: rolled back: replica 0" in server.told
    assert "'nothing' can't be read" in server.told
    code, out = server.run("weights", "status")
    assert code == 0
    assert "rolled back" in out
    assert server.made_by() == "step-1"

    for arguments, words in (
        (("weights", "abort"), "no rollout runs"),
        (("weights", "rollback"), "rolled back already"),
        (("weights", "update", "a", "--name=" + "x" * 65), "(--name): must have 1 to 64"),
        (("weights", "status", f"--admin={server.address}"), "is not the --admin-port"),
        (("weights", "status", "--admin=127.0.0.1:1"), "started with --admin-port?"),
        (("pause", "--admin=nonsense"), "has no port"),
    ):
        code, _ = server.run(*arguments)
        assert code == 1, arguments
        assert words in server.told, server.told
        assert len(server.told.splitlines()) == 1
    for arguments in (
        ("weights",),
        ("weights", "update", "a"),
        ("weights", "update", "a", "--name=x", "--strategy=none"),
        ("weights", "update", "a", "--name=x", "--observe=3"),
        ("pause", "--in-flight=none"),
    ):
        assert server.run(*arguments)[0] == 2

    assert server.run("pause", "--refuse-new")[0] == 0
    assert "paused" in server.run("weights", "status")[1]
    assert server.run("resume")[0] == 0
    assert "paused" not in server.run("weights", "status")[1]
    assert server.made_by() == "step-1"

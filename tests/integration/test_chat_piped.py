"""`twinplane chat` without a terminal, and how commands wait for a server."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Planes, free_port
from tests.support.scripted_inference import (
    Fail,
    ScriptedInference,
    delta,
    finished,
    serve,
    started,
)
from tests.unit.twinplane.cli_process import PATIENCE, run, start
from twinplane.inference.v1 import inference_pb2 as pb


def test_chat_through_a_pipe(simulated_planes: Planes) -> None:
    flags = ("--address", simulated_planes.address, "--max-tokens", "4", "--seed", "1")
    done = run("chat", *flags, stdin="ab\n/exit\nnever\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert ">" not in done.stdout.splitlines()[0][:1]


def test_one_question_is_one_answer(simulated_planes: Planes) -> None:
    flags = ("--address", simulated_planes.address, "--max-tokens", "4", "--seed", "1")
    asked = run("chat", "ab", *flags, stdin="never")
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout
    assert run("chat", "-", *flags, stdin="ab\n").stdout == asked.stdout
    assert run("generate", "ab", *flags).stdout == asked.stdout
    for empty in (("",), (" ",), ("-",)):
        refused = run("chat", *empty, *flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "the question is empty" in refused.stderr


def test_a_question_nobody_can_answer_fails_in_one_line(simulated_planes: Planes) -> None:
    nobody = run("chat", "x", "--address", f"127.0.0.1:{free_port()}", "--wait", "0")
    unknown = run("chat", "x", "--address", simulated_planes.address, "--model", "other")
    with serve(ScriptedInference(supports_chat=False)) as address:
        without = run("chat", "x", "--address", address)
    for done, said in (
        (nobody, "is `twinplane up` running?"),
        (unknown, "no model 'other' is served; there is tiny"),
        (without, "m has no chat template; `twinplane generate`"),
    ):
        assert (done.returncode, done.stdout) == (1, "")
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_server_whose_model_is_not_there_yet_is_waited_for() -> None:
    service = ScriptedInference(unready=3)
    service.scripts.append([started(), delta("late", 1), finished(reason=pb.FINISH_REASON_STOP)])
    with serve(service) as address:
        done = run("chat", "x", "--address", address, "--wait", "60")
        assert (done.returncode, done.stdout, done.stderr) == (0, "late\n", "")
        assert sum(isinstance(r, pb.ListModelsRequest) for r in service.requests) == 4
        service.unready = 10**6
        gone = run("generate", "x", "--address", address, "--wait", "0.5")
    assert gone.returncode == 1
    assert "no model" in gone.stderr


def test_a_server_that_does_not_listen_yet_is_waited_for(tmp_path: Path) -> None:
    """The command looks for as long as it was told to; then the reason is the usual one."""
    service = ScriptedInference()
    service.scripts.append([started(), delta("late", 1), finished(reason=pb.FINISH_REASON_STOP)])
    with socket.socket() as holder:  # the port is taken, and nobody listens
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        waiting = start("chat", "x", "--address", f"127.0.0.1:{port}", "--wait", "60")
        briefly = run("chat", "x", "--address", f"127.0.0.1:{port}", "--wait", "0.1")
        assert (briefly.returncode, briefly.stdout) == (1, "")
        assert "connection refused" in briefly.stderr
        assert waiting.poll() is None, "it still waits"
    with serve(service, port=port):
        output, _ = waiting.communicate(timeout=PATIENCE)
    assert (waiting.returncode, output) == (0, "late\n")
    missing = run("generate", "x", "--address", f"unix:{tmp_path}/none", "--wait", "0.1")
    assert "there is no such socket" in missing.stderr


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_what_waiting_does_not_help_is_told_at_once(command: str) -> None:
    """Whatever the wait, which outlasts this test's patience."""
    service = ScriptedInference()
    service.failures.extend([Fail(grpc.StatusCode.UNAVAILABLE, "it drains")] * 9)
    with serve(service) as address:
        for flags in (("--address", address), ("--address", address, "--tls")):
            done = run(command, "x", *flags, "--wait", "1000")
            assert done.returncode == 1

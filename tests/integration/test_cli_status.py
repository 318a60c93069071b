"""`twinplane status`: of each plane, ready and not, and of what is no Twinplane."""

from __future__ import annotations

import json
import socket
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Plane, Planes, free_port, running_planes
from tests.unit.twinplane.cli_process import PATIENCE, run
from twinplane.models import SIMULATED_MODEL, resolve


def test_a_control_plane_says_what_it_serves(simulated_planes: Planes) -> None:
    done = run("status", "--address", simulated_planes.address)
    assert done.returncode == 0, done.stderr
    words = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["model", "tiny"] in words
    assert ["worker", "attached"] in words
    assert any(line.split() == ["control", "plane", "ready"] for line in done.stdout.splitlines())


def test_machines_get_an_object(simulated_planes: Planes) -> None:
    report = json.loads(run("status", "--json", "--address", simulated_planes.address).stdout)
    (model,) = report.pop("models")
    assert report == {
        "address": simulated_planes.address,
        "plane": "control plane",
        "ready": True,
        "reason": "",
        "worker": "attached",
    }
    assert (model["name"], model["supports_chat"]) == ("tiny", True)
    assert len(model["weight_digest"]) == 64


def test_a_worker_is_told_from_a_control_plane(simulated_planes: Planes) -> None:
    done = run("status", "--json", "--address", simulated_planes.worker_address)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["plane"], report["ready"]) == ("worker", True)
    assert (report["device"], report["controller"]) == ("simulated", "epoch 1")
    assert report["models"][0]["vocabulary_size"] > 0


def test_without_a_worker_it_is_not_ready(tmp_path: Path) -> None:
    port = free_port()
    flags = [f"--port={port}", f"--worker=127.0.0.1:{free_port()}", "--metrics-port=none"]
    plane = Plane(["control", "--model=simulated", *flags], tmp_path / "log")
    try:
        deadline = time.monotonic() + PATIENCE
        while (done := run("status", f"--address=127.0.0.1:{port}")).stdout == "":
            assert time.monotonic() < deadline, done.stderr
        assert done.returncode == 1
        assert "not ready" in done.stdout
        assert "reason" in done.stdout
        assert "\nmodel" not in done.stdout
    finally:
        plane.stop()


def test_a_lost_worker_is_said_while_requests_wait(tmp_path: Path) -> None:
    with running_planes(tmp_path, resolve(SIMULATED_MODEL)) as planes:
        planes.worker.process.kill()
        planes.worker.process.wait()
        deadline = time.monotonic() + PATIENCE
        while (done := run("status", "--json", "--address", planes.address)).returncode == 0:
            assert time.monotonic() < deadline
        report = json.loads(done.stdout)
        assert report["ready"] is False
        assert "worker" in report["reason"]
        assert "worker" not in report


def test_another_grpc_server_is_neither_plane() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        done = run("status", f"--address=127.0.0.1:{port}")
    finally:
        server.stop(None).wait()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"twinplane status: the server at 127.0.0.1:{port} is no control plane"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("silent", [False, True])
def test_where_nothing_answers_it_is_one_line(silent: bool) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        done = run("status", "--timeout=0.5", f"--address={address}")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("twinplane status: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x"])
def test_a_wrong_timeout_is_wrong_usage(seconds: str) -> None:
    done = run("status", f"--timeout={seconds}")
    assert done.returncode == 2
    assert "--timeout" in done.stderr

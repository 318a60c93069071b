"""`twinplane status`: of each plane, ready and not, and of what is no Twinplane."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
from collections import deque
from concurrent import futures
from dataclasses import fields
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Plane, Planes, free_port, running_planes
from tests.support.scripted_inference import ScriptedInference, serve
from tests.unit.twinplane.cli_process import PATIENCE, run
from twinplane.client.values import ServingWorker
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.models import SIMULATED_MODEL, resolve


def away(seconds: float) -> pb.ServingWorker:
    worker = pb.ServingWorker(state=pb.WORKER_STATE_AWAY, worker_id="w", device="cpu")
    worker.away.FromNanoseconds(round(seconds * 1e9))
    return worker


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What is said of each subject."""
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in done.stdout.splitlines())


def test_a_control_plane_says_what_it_serves(simulated_planes: Planes) -> None:
    done = run("status", "--address", simulated_planes.address)
    assert done.returncode == 0, done.stderr
    said = rows(done)
    assert (said["control plane"], said["worker"], said["model"]) == ("ready", "attached", "tiny")
    assert said["sampling"] == "temperature 1, top-k 0, top-p 1, min-p 0 by default"
    assert re.fullmatch(r"([\d,]+) of \1 KV tokens are free", said["room"])
    assert re.fullmatch(r"0 run, 0 wait; at most [\d,]+ run at once", said["sequences"])


def test_machines_get_an_object(simulated_planes: Planes) -> None:
    report = json.loads(run("status", "--json", "--address", simulated_planes.address).stdout)
    (model,) = report.pop("models")
    (worker,) = report.pop("workers")
    assert report == {
        "address": simulated_planes.address,
        "plane": "control plane",
        "ready": True,
        "reason": "",
    }
    assert (model["name"], model["supports_chat"]) == ("tiny", True)
    assert len(model["weight_digest"]) == 64
    assert model["default_sampling"] == {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
    assert set(worker) == {field.name for field in fields(ServingWorker)}
    assert (worker["state"], worker["away_seconds"]) == ("attached", None)
    assert worker["kv_token_count"] == worker["free_kv_token_count"] > 0


def test_a_worker_is_told_from_a_control_plane(simulated_planes: Planes) -> None:
    done = run("status", "--json", "--address", simulated_planes.worker_address)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["plane"], report["ready"]) == ("worker", True)
    assert (report["device"], report["controller"]) == ("simulated", "epoch 1")
    assert report["models"][0]["vocabulary_size"] > 0
    assert report["kv_token_count"] == report["free_kv_token_count"] > 0
    assert report["max_sequence_count"] > 0
    assert report["workers"] == []


def test_without_a_worker_it_is_not_ready(tmp_path: Path) -> None:
    port = free_port()
    flags = [f"--port={port}", f"--worker=127.0.0.1:{free_port()}", "--metrics-port=none"]
    plane = Plane(["control", "--model=simulated", *flags], tmp_path / "log")
    try:
        deadline = time.monotonic() + PATIENCE
        while (done := run("status", f"--address=127.0.0.1:{port}")).stdout == "":
            assert time.monotonic() < deadline, done.stderr
        assert done.returncode == 1
        said = rows(done)
        assert re.fullmatch(r"0, at 127\.0\.0\.1:\d+", said.pop("replica"))
        because = said.pop("because")
        assert because == "it was listed" or because.startswith("no worker answers at 127.0.0.1:")
        assert said == {
            "address": f"127.0.0.1:{port}",
            "control plane": "not ready",
            "reason": "no worker has come yet: requests are refused until one does",
            "worker": "none has come yet",
        }
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
        assert report["reason"].startswith("its worker has been away for ")
        assert report["reason"].endswith(" s: requests wait for it")
        assert report["workers"][0]["state"] == "away"
        assert report["workers"][0]["away_seconds"] > 0
        assert re.fullmatch(
            r"away for \d+ s", rows(run("status", "--address", planes.address))["worker"]
        )


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


@pytest.mark.parametrize(
    ("life", "said"),
    [(1, "none has come yet"), (2, "attached"), (3, "suspect"), (4, "away for 7 s"),
     (5, "draining"), (6, "gone for 7 s"), (0, "attached"), (99, "attached")],
)  # fmt: skip
def test_each_replica_says_where_it_is_and_why(life: int, said: str) -> None:
    """A server that is older than the state, or newer, has its workers all the same."""
    state = {1: 3, 4: 2, 6: 2}.get(life, 1)
    first = away(7.0) if state == 2 else pb.ServingWorker(state=state)  # type: ignore[arg-type]
    first.MergeFrom(
        pb.ServingWorker(address="gpu-3:1", replica=3, reason="some reason", replica_state=life)  # type: ignore[arg-type]
    )
    second = pb.ServingWorker(state=1, address="gpu-4:1", replica=4, replica_state=2)  # type: ignore[arg-type]
    with serve(ScriptedInference(health=deque([1]), workers=[first, second])) as address:
        done = run("status", f"--address={address}")
    lines = [re.split(r" {2,}", line, maxsplit=1) for line in done.stdout.splitlines()]
    assert ["worker", said] in lines and ["replica", "3, at gpu-3:1"] in lines
    assert (["because", "some reason"] in lines) is (life != 2)
    assert ["replica", "4, at gpu-4:1"] in lines


@pytest.mark.parametrize(
    ("workers", "models", "reason", "state"),
    [
        ([], 1, "no worker has come yet: requests are refused until one does", None),
        ([pb.ServingWorker(state=3)], 0, "no worker has come yet: ", "none has come yet"),
        ([away(0.2)], 1, "its worker has been away for 1 s: requests wait for it", "away for 1 s"),
        (
            [away(3600)],
            0,
            "its worker has been away for 3600 s: requests are refused until it is back",
            "away for 3600 s",
        ),
        ([pb.ServingWorker(state=1)], 1, "it shuts down: it finishes what runs", "attached"),
        ([pb.ServingWorker(state=9)], 1, "no worker has come yet: ", "unknown"),
    ],
)  # fmt: skip
def test_why_a_server_is_not_ready(
    workers: list[pb.ServingWorker], models: int, reason: str, state: str | None
) -> None:
    service = ScriptedInference(health=deque([2]), workers=workers, unready=0 if models else 9)
    with serve(service) as address:
        done = run("status", f"--address={address}")
    assert done.returncode == 1
    said = rows(done)
    assert said["control plane"] == "not ready"
    assert said["reason"].startswith(reason)
    assert said.get("worker") == state
    assert ("model" in said) is bool(models)

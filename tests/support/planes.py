"""Starts real planes as processes on loopback, waits until they serve, and stops them.

    with running_planes(tmp_path, model) as planes:
        Client(planes.address)

Each plane logs into a file of its own; a test that fails to start one shows the end of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 30.0
_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def plane_environment(**variables: str) -> dict[str, str]:
    """This process's environment without settings of Twinplane, but with the model cache's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TWINPLANE_")}
    if home := os.environ.get("TWINPLANE_HOME"):
        kept["TWINPLANE_HOME"] = home
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **variables}


class PlaneFailed(AssertionError):
    """A plane ended, or did not serve in time; carries the end of its log."""


class Plane:
    """One running process of `twinplane …`. `prelude` is Python run before it."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        prelude: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-c", prelude + "\n" + _CLI, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=environment or plane_environment(),
            )

    def wait_until_serving(self, address: str, seconds: float = START_SECONDS) -> None:
        """Waits for grpc.health.v1 to say SERVING. Raises PlaneFailed."""
        deadline = time.monotonic() + seconds
        while not is_serving(address):
            if self.process.poll() is not None:
                raise PlaneFailed(f"ended with {self.process.returncode}\n{self.log_end()}")
            if time.monotonic() > deadline:
                raise PlaneFailed(f"does not serve {address}\n{self.log_end()}")
            time.sleep(0.05)

    def log_end(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-40:])

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Asks the process to end and waits; returns its exit code. Kills it in the last resort."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


def is_serving(address: str, service: str = "") -> bool:
    """Whether the server there says that it serves, or that `service` does."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=2.0
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True)
class Planes:
    """Both planes, serving."""

    address: str
    worker_address: str
    metrics_url: str
    control: Plane
    worker: Plane


@contextmanager
def running_planes(
    folder: Path,
    model: str | Path,
    *,
    worker_flags: Sequence[str] = ("--simulate",),
    control_flags: Sequence[str] = (),
    prelude: str = "",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Planes]:
    """A worker on a Unix socket, by default simulated, and a control plane on free ports.

    `folder` takes the logs. `model` is a name in the model cache or a folder.
    """
    sockets = Path(tempfile.mkdtemp(prefix="twinplane-"))  # a socket's path must be short
    worker_socket = sockets / "worker.sock"
    port, metrics_port = free_port(), free_port()
    planes: list[Plane] = []
    try:
        worker = Plane(
            ["worker", "--model", str(model), "--uds", str(worker_socket), *worker_flags],
            folder / "worker.log",
            prelude=prelude,
            environment=environment,
        )
        planes.append(worker)
        control = Plane(
            ["control", "--model", str(model), "--worker", f"unix:{worker_socket}",
             "--port", str(port), "--metrics-port", str(metrics_port), *control_flags],
            folder / "control.log",
            prelude=prelude,
            environment=environment,
        )  # fmt: skip
        planes.append(control)
        worker.wait_until_serving(f"unix:{worker_socket}")
        control.wait_until_serving(f"127.0.0.1:{port}")
        yield Planes(
            address=f"127.0.0.1:{port}",
            worker_address=f"unix:{worker_socket}",
            metrics_url=f"http://127.0.0.1:{metrics_port}/metrics",
            control=control,
            worker=worker,
        )
    finally:
        for plane in reversed(planes):
            plane.stop()
        shutil.rmtree(sockets, ignore_errors=True)

"""Starts the peers' servers, and freezes one while it must not disturb.

A server that waits for requests may still spin: only one server at a time is awake here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.service import free_port

LLAMACPP_SCRIPT = Path(__file__).with_name("llamacpp_server.py")
VLLM_NAME = "peer"
_VLLM_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class PeerServer:
    """A running server on a loopback port, with all the processes it is made of."""

    name: str
    model: str
    port: int
    pid: int

    @contextlib.contextmanager
    def awake(self) -> Iterator[PeerServer]:
        """Lets it run until the block is left."""
        self.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes, as far as they still are."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def stop(self) -> None:
        """Ends all of its processes."""
        processes = self._processes()
        self.signal(signal.SIGCONT)
        for process in processes[:1]:
            process.terminate()
        _, alive = psutil.wait_procs(processes, 10)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return []
        return [top, *top.children(recursive=True)]


@contextlib.contextmanager
def vllm(environment: Path, model_folder: Path, *, running: str | None) -> Iterator[PeerServer]:
    """vLLM's CPU backend in float32 on all cores, frozen; ready after minutes.

    `running`, PORT:PID, names one that runs already; it is left as it was met.
    """
    if running is not None:
        port, _, pid = running.partition(":")
        server = PeerServer("vllm float32", VLLM_NAME, int(port), int(pid))
        with server.awake():
            _wait_until_ready(server, 60)
        yield server
        return
    port, cores = free_port(), os.cpu_count() or 1
    command = [
        str(environment / "bin" / "vllm"), "serve", str(model_folder), "--dtype", "float32",
        "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", VLLM_NAME,
    ]  # fmt: skip
    variables = {
        **_VLLM_VARIABLES,
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}",
        "OMP_NUM_THREADS": str(cores),
    }
    with _server("vllm float32", VLLM_NAME, port, command, variables, 600) as server:
        yield server


@contextlib.contextmanager
def llamacpp(
    environment: Path, file: Path, *, slots: int, slot_tokens: int, frozen: bool = True
) -> Iterator[PeerServer]:
    """llama.cpp's server on all cores, frozen unless asked otherwise."""
    port, cores = free_port(), os.cpu_count() or 1
    command = [
        str(environment / "bin" / "python"), str(LLAMACPP_SCRIPT), str(file),
        *map(str, (port, slots, slot_tokens, cores)),
    ]  # fmt: skip
    name = f"llama.cpp {file.stem.rpartition('.')[2]}"
    with _server(name, "peer", port, command, {}, 120, frozen=frozen) as server:
        yield server


@contextlib.contextmanager
def _server(
    name: str,
    model: str,
    port: int,
    command: Sequence[str],
    variables: dict[str, str],
    patience: float,
    *,
    frozen: bool = True,
) -> Iterator[PeerServer]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd=folder,
            )
        server = PeerServer(name, model, port, process.pid)
        try:
            try:
                _wait_until_ready(server, patience)
            except TimeoutError as error:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} does not serve:\n{tail}") from error
            if frozen:
                server.signal(signal.SIGSTOP)
            yield server
        finally:
            server.stop()
            process.wait()


def _wait_until_ready(server: PeerServer, patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline and _lives(server.pid):
        if is_ready(server.port):
            return
        time.sleep(0.02)
    raise TimeoutError


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_ready(port: int) -> bool:
    """Whether a server there answers and has its model loaded."""
    # An opener without proxies: loopback is reached directly, whatever the environment says.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def gguf_file(peers: Path, chosen: Path | None) -> Path | None:
    """The model for llama.cpp: the chosen one, else the first beside the environments."""
    return chosen or min(peers.glob("*.gguf"), default=None)

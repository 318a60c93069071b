"""Whoever reads the planes' logs may stop, or their disk be full: serving goes on as before."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.support.planes import ROOT, free_port, is_serving, plane_environment
from twinplane import Client

pytestmark = pytest.mark.slow

SECONDS = 60.0
CALLS = 2000
MOST_CALLS = 30_000
METHOD = "/twinplane.inference.v1.InferenceService/"
# Each is refused, and a client can send it as often as it likes.
MALFORMED = (b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x0b" * 50, b"\x00\x00")
_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Server:
    """What serves, and where."""

    address: str
    metrics_url: str


def processes(way: str, folder: Path, model: Path, flags: tuple[str, ...]) -> list[list[str]]:
    """The commands of one way to run both planes."""
    if way == "up":
        return [["up", "--simulate", "--simulate-step-ms=0.5", f"--model={model}", *flags]]
    socket = folder / "w.sock"
    return [
        ["worker", "--simulate", "--simulate-step-ms=0.5", f"--model={model}", f"--uds={socket}",
         "--log-level=debug"],
        ["control", f"--model={model}", f"--worker=unix:{socket}", *flags],
    ]  # fmt: skip


@contextmanager
def serving(way: str, model: Path, stderr: int) -> Iterator[Server]:
    port, metrics_port = free_port(), free_port()
    flags = (f"--port={port}", f"--metrics-port={metrics_port}")
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        try:
            running += [
                subprocess.Popen(
                    [sys.executable, "-c", _CLI, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    cwd=ROOT,
                    env=plane_environment(TMPDIR=folder),
                )
                for arguments in processes(way, Path(folder), model, flags)
            ]
            address = f"127.0.0.1:{port}"
            while not is_serving(address):
                assert all(process.poll() is None for process in running)
            yield Server(address, f"http://127.0.0.1:{metrics_port}/metrics")
            for process in reversed(running):
                process.terminate()
                assert process.wait(SECONDS) == 0
        finally:
            for process in running:
                process.kill()
                process.wait()


def dropped(server: Server) -> int:
    with urllib.request.urlopen(server.metrics_url, timeout=SECONDS) as answer:
        text = answer.read().decode()
    found = re.search(r"^twinplane_log_records_dropped_total ([\d.e+]+)$", text, re.MULTILINE)
    assert found
    return int(float(found[1]))


def provoke(server: Server, calls: int) -> None:
    """Calls that are refused, and one in four that is not; each gets its answer. Of those that are
    refused, the log tells only some each second; of the others, each is a line.
    """
    with (
        Client(server.address, timeout=SECONDS) as client,
        grpc.insecure_channel(server.address, [("grpc.enable_http_proxy", 0)]) as channel,
    ):
        generate = channel.unary_stream(
            f"{METHOD}Generate", request_serializer=None, response_deserializer=None
        )
        tokenize = channel.unary_unary(
            f"{METHOD}Tokenize", request_serializer=None, response_deserializer=None
        )
        for number in range(calls):
            if number % 4 == 3:
                assert client.generate([5], max_tokens=1, ignore_eos=True).result().token_ids
                continue
            body = MALFORMED[number // 4 % len(MALFORMED)]
            with pytest.raises(grpc.RpcError) as refused:
                if number % 2:
                    list(generate(body, timeout=SECONDS))
                else:
                    tokenize(body, timeout=SECONDS)
            assert refused.value.code() not in (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                grpc.StatusCode.UNAVAILABLE,
            )


def generated(server: Server) -> list[int]:
    with Client(server.address, timeout=SECONDS) as client:
        result = client.generate("a b", max_tokens=200, seed=5, ignore_eos=True).result()
        return list(result.token_ids)


@pytest.mark.parametrize("way", ["up", "apart"])
def test_a_reader_that_stops_stops_nobody(way: str, tiny_model: Path) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with serving(way, tiny_model, writer) as server:
        os.close(writer)
        before = generated(server)
        neighbour: list[list[int]] = []
        thread = threading.Thread(target=lambda: neighbour.append(generated(server)))
        thread.start()
        made = 0
        while made < CALLS or not dropped(server):
            assert made < MOST_CALLS, "no log line was dropped"
            provoke(server, 500)
            made += 500
        thread.join(SECONDS)
        assert neighbour == [before]
        assert is_serving(server.address)
        count = dropped(server)
        text = b""
        while not (told := re.search(rb'records were dropped", "count": (\d+)', text)):
            text += os.read(reader, 1 << 16)
        assert 0 < int(told[1]) <= count
        os.set_blocking(reader, False)  # and stops again: the end must not wait for it
    os.close(reader)


def test_a_full_disk_stops_nobody(tiny_model: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with serving("up", tiny_model, full) as server:
        before = generated(server)
        provoke(server, CALLS // 4)
        assert generated(server) == before
        assert is_serving(server.address)
    os.close(full)


def test_a_reader_that_is_gone_stops_nobody(tiny_model: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with serving("apart", tiny_model, writer) as server:
        before = generated(server)
        provoke(server, CALLS // 4)
        assert dropped(server) > 0
        assert generated(server) == before
    os.close(writer)

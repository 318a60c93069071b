"""Both clients when no control plane answers, when one is not ready, and what goes with calls."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import twinplane
from tests.support.client_callers import Call, asynchronous, blocking
from tests.support.planes import free_port
from tests.support.scripted_inference import (
    PATIENCE,
    Fail,
    ScriptedInference,
    finished,
    serve,
    started,
)
from tests.support.small_server import SERVICE, small_server
from twinplane import (
    Client,
    Health,
    RetryPolicy,
    TlsCredentials,
    WrongServer,
)
from twinplane.client.endpoint import Endpoint

ONCE = RetryPolicy(max_attempts=1)
CALLERS = pytest.mark.parametrize("caller", [blocking, asynchronous], ids=["sync", "async"])

# --- nobody, or somebody else -------------------------------------------------------------------


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """A listener that sends `answer` to whoever connects, and closes; None: it only closes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        over = threading.Event()

        def accept() -> None:
            while not over.is_set():
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(PATIENCE)
                    if answer is not None:
                        connection.recv(1 << 12)
                        connection.sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"127.0.0.1:{port}"
        finally:
            over.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join(PATIENCE)


HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def failing(caller: Call, address: str, **client: Any) -> str:
    settings = {"retry": ONCE, **client}
    with pytest.raises(twinplane.Unavailable) as caught:
        caller(address, "list_models", sleeps=[], client=settings)
    assert caught.value.reason == ""
    return str(caught.value)


@CALLERS
def test_the_address_and_the_cause_are_in_the_line(caller: Call, tmp_path: Path) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert failing(caller, nobody) == f"no server answers at {nobody}: connection refused"
    missing = f"unix:{tmp_path}/none.sock"
    assert failing(caller, missing) == f"no server answers at {missing}: there is no such socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/dead.sock")
    dead_socket = f"unix:{tmp_path}/dead.sock"
    assert failing(caller, dead_socket) == f"no server answers at {dead_socket}: connection refused"


@CALLERS
def test_something_else_that_listens_is_told_apart(caller: Call) -> None:
    for words in (HTTP, b"SSH-2.0-OpenSSH_9.2\r\n"):
        with listening(words) as address:
            line = failing(caller, address)
            assert line.startswith(f"no server answers at {address}: ")
            assert "does not speak gRPC" in line
            assert "does not speak TLS" in failing(caller, address, credentials=TlsCredentials())
    with listening(None) as address:
        assert "does it want TLS?" in failing(caller, address)


NOBODY = "failed to connect to all addresses; last error: "


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (NOBODY + "UNKNOWN: ipv4:1.2.3.4:5: Connection refused", "connection refused"),
        ("errors resolving x:1: […Domain name not found]", "no host has this name"),
        ("errors resolving x:1: […Timeout]", "the host's name can't be looked up"),
        ("DNS resolution failed for x:1: C-ares", "the host's name can't be looked up"),
        (NOBODY + "No route to host", "no route to the host"),
        (NOBODY + "Network is unreachable", "the network is unreachable"),
        (NOBODY + "connection timed out", "the connection timed out"),
        (NOBODY + "Socket closed", "it closes connections at once; does it want TLS?"),
        (NOBODY + "CERTIFICATE_VERIFY_FAILED: …", "its TLS certificate is not trusted"),
        (NOBODY + "Hostname Verification Check failed.", "its TLS certificate is for another host"),
        (NOBODY + "something new", NOBODY + "something new"),
    ],
)
def test_why_nobody_answers(text: str, cause: str) -> None:
    said = Endpoint("here:1", is_secure=False).unavailable(text)
    assert said == f"no server answers at here:1: {cause}"
    long = Endpoint("here:1", is_secure=True).unavailable("failed to connect " * 99)
    assert len(long) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Socket closed", "the connection to here:1 broke: it was closed"),
        ("recvmsg:Connection reset by peer", "the connection to here:1 broke: it was closed"),
        ("keepalive watchdog timeout", "the connection to here:1 broke: it fell silent"),
        ("upstream connect error", "here:1: upstream connect error"),
    ],
)
def test_why_a_connection_broke(text: str, said: str) -> None:
    assert Endpoint("here:1", is_secure=False).unavailable(text) == said


@CALLERS
@pytest.mark.parametrize("method", ["generate", "complete", "tokenize", "list_models"])
async def test_a_worker_and_other_servers_are_told_apart(method: str, caller: Call) -> None:
    arguments = [] if method == "list_models" else ["x"]

    async def answer(request: object, context: object) -> Any:
        yield b""

    def line(address: str) -> str:
        with pytest.raises(WrongServer) as caught:
            caller(address, method, *arguments, sleeps=[], client={"retry": ONCE})
        return str(caught.value)

    async with small_server(answer) as port:
        address = f"127.0.0.1:{port}"
        said = await asyncio.to_thread(line, address)
        assert said == f"the server at {address} is no control plane; it serves {SERVICE}"
    # One that nobody here wrote.
    other = grpc.server(ThreadPoolExecutor(2))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    try:
        said = await asyncio.to_thread(line, f"127.0.0.1:{port}")
        assert said == f"the server at 127.0.0.1:{port} is no control plane: Method not found!"
    finally:
        other.stop(None).wait()


@CALLERS
def test_a_worker_says_so(simulated_planes: Any, caller: Call) -> None:
    address = simulated_planes.worker_address
    for method in ("list_models", "health", "wait_ready"):
        with pytest.raises(WrongServer) as caught:
            caller(address, method, sleeps=[])
        if method == "list_models":
            assert str(caught.value).startswith(
                f"a worker listens at {address}, not a control plane"
            )
    assert caller(simulated_planes.address, "health", sleeps=[]) is Health.SERVING
    assert caller(simulated_planes.address, "complete", "x", max_tokens=3, sleeps=[]).token_ids


# --- metadata -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("generate", ["x"]), ("complete", ["x"]), ("tokenize", ["x"]), ("detokenize", [[1]]),
        ("list_models", []), ("health", []), ("wait_ready", []),
    ],
)  # fmt: skip
def test_metadata_goes_with_every_call(
    service: ScriptedInference, method: str, arguments: list[Any]
) -> None:
    service.health.append(1)
    service.scripts.extend([[started(), finished()]] * 2)
    metadata = {"Authorization": "Bearer one", "trace-bin": b"\x00\xff"}
    with serve(service) as address:
        for caller in (blocking, asynchronous):
            caller(address, method, *arguments, sleeps=[], client={"metadata": metadata})
    assert len(service.metadata) == 2
    for seen in service.metadata:
        assert (seen["authorization"], seen["trace-bin"]) == ("Bearer one", b"\x00\xff")


def test_a_token_can_be_renewed(service: ScriptedInference) -> None:
    token = {"authorization": "Bearer one"}
    with serve(service) as address, Client(address, metadata=token) as client:
        client.list_models()
        token["authorization"] = "Bearer two"
        client.list_models()
    assert [seen["authorization"] for seen in service.metadata] == ["Bearer one", "Bearer two"]


# --- health -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "health"), [(1, Health.SERVING), (2, Health.NOT_SERVING), (0, Health.NOT_SERVING)]
)
def test_health(call: Call, service: ScriptedInference, answer: int, health: Health) -> None:
    service.health.append(answer)
    with serve(service) as address:
        for caller in (blocking, asynchronous):
            assert caller(address, "health", sleeps=[]) is health


@CALLERS
def test_ready_is_waited_for(service: ScriptedInference, caller: Call) -> None:
    service.health.extend(
        [2, Fail(grpc.StatusCode.UNAVAILABLE), 2, Fail(grpc.StatusCode.DEADLINE_EXCEEDED), 2, 2, 1]
    )
    sleeps: list[float] = []
    with serve(service) as address:
        caller(address, "wait_ready", sleeps=sleeps)
    assert sleeps == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@CALLERS
@pytest.mark.parametrize("is_there", [True, False])
def test_a_wait_that_is_over_says_why(
    service: ScriptedInference, caller: Call, is_there: bool
) -> None:
    service.health.append(2)
    now = [0.0]
    sleeps: list[float] = []

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    settings = {"clock": clock}
    with serve(service) as address:
        where = address if is_there else f"127.0.0.1:{free_port()}"
        with pytest.raises(twinplane.DeadlineExceeded) as caught:
            caller(where, "wait_ready", 9.0, sleeps=sleeps, client=settings)
    line = str(caught.value)
    assert line.startswith(f"{where} was not ready after 9 s: ")
    assert ("no worker yet" if is_there else "connection refused") in line
    assert sleeps

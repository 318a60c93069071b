"""Commands that are sent to what is no Twinplane: one line says what it is and what to do."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.support.planes import Planes, free_port
from twinplane.cli import main, served
from twinplane.client.endpoint import Endpoint

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
COMMANDS = {
    "generate": ["generate", "hi", "--wait=0"],
    "chat": ["chat", "hi", "--wait=0"],
    "status": ["status", "--timeout=1"],
}
TLS = ["--tls"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate that nobody trusts, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return certificate, key


@pytest.fixture(scope="module")
def strangers(pair: tuple[Path, Path], simulated_planes: Planes) -> Iterator[dict[str, str]]:
    """Addresses, by what listens there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    answers: dict[str, Callable[[socket.socket], object] | None] = {
        "silence": None,
        "web server": lambda connection: connection.recv(4096) and connection.sendall(HTTP),
        "TLS server": lambda connection: context.wrap_socket(connection, server_side=True),
        "SSH server": lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n"),
        "closes at once": lambda connection: None,
    }
    server = grpc.server(futures.ThreadPoolExecutor(1))
    addresses = {
        "nobody": f"127.0.0.1:{free_port()}",
        "a worker": simulated_planes.worker_address,
        "another gRPC server": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}",
    }
    server.start()
    listeners = [Listener(answer) for answer in answers.values()]
    addresses |= {name: each.address for name, each in zip(answers, listeners, strict=True)}
    yield addresses
    for listener in listeners:
        listener.close()
    server.stop(None).wait()


class Listener:
    """Answers whoever connects, and closes; without an answer it says nothing and stays."""

    def __init__(self, answer: Callable[[socket.socket], object] | None) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        kept = []
        while not self._over.is_set():
            connection, _ = self._listener.accept()
            connection.settimeout(10)
            if self._answer is None:
                kept.append(connection)
                continue
            with connection, suppress(OSError):  # TLS that fails is one
                self._answer(connection)
        for connection in kept:
            connection.close()

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(60)
        self._listener.close()


WHO = [
    ("nobody", [], "connection refused (is `twinplane up` running? "),
    ("silence", [], "had not answered in full after 1 s (it is no Twinplane, or it hangs: "),
    ("web server", [], "what listens there is a web server and does not speak gRPC (--address or "),
    ("web server", TLS, "does not speak TLS (without --tls it is not encrypted; --address or "),
    ("SSH server", [], "what listens there does not speak gRPC; a web server? (--address or "),
    ("TLS server", [], "does it want TLS? (--tls encrypts; --address or "),
    ("TLS server", TLS, "its TLS certificate is not trusted (--tls-ca names the certificates "),
    ("closes at once", [], "it closes connections at once; does it want TLS? (--tls encrypts; "),
    ("closes at once", TLS, "does it want a TLS certificate of its clients? (--tls-cert and "),
    ("another gRPC server", [], "is no control plane: Method not found! (--address or "),
    ("another gRPC server", TLS, "what listens there does not speak TLS (without --tls "),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("who", "flags", "said"), WHO)
def test_one_line_says_who_it_is_and_what_to_do(
    command: str, who: str, flags: list[str], said: str, strangers: dict[str, str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(served, "_LOOK_SECONDS", 1.0)
    arguments = [*COMMANDS[command], *flags, f"--address={strangers[who]}"]
    if command != "status" and who == "nobody":
        arguments.remove("--wait=0")
        arguments.append("--wait=0.1")
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"twinplane {command}: ")
    assert strangers[who] in line
    assert said in line


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_worker_is_named_as_one(
    command: str, strangers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMANDS[command], f"--address={strangers['a worker']}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"a worker listens at {strangers['a worker']}, not a control plane: connect to " in line
    assert line.endswith("(--address or TWINPLANE_ADDRESS)")


def test_a_server_that_says_nothing_for_as_long_as_grpc_waits() -> None:
    text = "failed to connect to all addresses; timed out before receiving SETTINGS frame"
    said = "what listens there says nothing: no Twinplane, or it hangs"
    assert Endpoint("a:1", is_secure=False).unavailable(text).endswith(f" at a:1: {said}")

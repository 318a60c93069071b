"""Binds a server to a TCP address or a Unix socket, or says why that is impossible."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc


class CannotListen(Exception):
    """An address could not be bound; the message names it and says why."""


def listen(server: grpc.aio.Server, host: str, port: int, uds: Path | None) -> str:
    """Makes `server` listen on the Unix socket `uds` if it is given, else on host:port.

    Returns the address that clients use. With port 0 the system chooses a free port, and the
    address names it. Only the owner can use the socket (mode 0600). A socket that a dead process
    left behind is replaced. The caller removes the socket when the server has stopped. A taken port
    is an error only with the option grpc.so_reuseport=0. Raises CannotListen.
    """
    if uds is not None:
        return _listen_unix(server, uds.absolute())
    literal = f"[{host}]" if ":" in host else host
    return f"{literal}:{_add(server, f'{literal}:{port}')}"


def _listen_unix(server: grpc.aio.Server, path: Path) -> str:
    _remove_dead_socket(path)
    mask = os.umask(0o177)  # with chmod afterwards, others could connect for a moment
    try:
        _add(server, f"unix:{path}")
    finally:
        os.umask(mask)
    return f"unix:{path}"


def _add(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(f"can't listen on {address}: is another process there?") from error
    if port == 0:
        raise CannotListen(f"can't listen on {address}")
    return port


def _remove_dead_socket(path: Path) -> None:
    """Removes a socket that nobody listens on. Raises CannotListen for anything else in the way."""
    if not path.exists():
        return
    if not path.is_socket():
        raise CannotListen(f"can't listen on {path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise CannotListen(f"can't listen on {path}: {error.strerror}") from error
        else:
            raise CannotListen(f"can't listen on {path}: another process does")

"""Binds a server to a TCP address or a Unix socket, or says plainly why not."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc


class CannotListen(Exception):
    """An address could not be bound; the message names it and says why."""


def listen_tcp(server: grpc.aio.Server, host: str, port: int) -> str:
    """Adds host:port (port 0: any free one); returns the address with the real port.

    Raises CannotListen.
    """
    literal = f"[{host}]" if ":" in host else host
    return f"{literal}:{_add(server, f'{literal}:{port}')}"


def listen_unix(server: grpc.aio.Server, path: Path) -> str:
    """Adds a Unix socket that only its owner can use; returns its address.

    A socket that a dead process left behind is replaced. Raises CannotListen.
    """
    path = path.absolute()
    _remove_dead_socket(path)
    mask = os.umask(0o177)  # chmod afterwards would leave a moment in which it is open to all
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

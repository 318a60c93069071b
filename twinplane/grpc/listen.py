"""Binds a server to a TCP address or a Unix socket, or says why that is impossible."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import grpc

from twinplane.paths import utf8_path

_LONGEST_SOCKET_PATH = 107
_PROBE_SECONDS = 2.0
# gRPC reads addresses as URIs, and a comma as the end of one.
_SPECIAL_CHARACTERS = "%#?,"
_TAKEN = (errno.EADDRINUSE, errno.EACCES)
_ALL_HOSTS = frozenset({"0.0.0.0", "::"})


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
    check_port(host, port)
    literal = f"[{host}]" if ":" in host else host
    return f"{literal}:{_add(server, f'{literal}:{port}')}"


def check_addresses(
    host: str, port: int, uds: Path | None, metrics_host: str, metrics_port: int | None
) -> int:
    """Raises CannotListen unless a plane can listen there: before it loads what may take long.

    Returns the port, or a free one for 0.
    """
    if metrics_port is not None:
        check_port(metrics_host, metrics_port, "metrics-")
    if uds is not None:
        check_socket_path(uds.absolute())
        return port
    if metrics_port is not None:
        _check_apart(host, port, metrics_host, metrics_port)
    return check_port(host, port)


def check_port(host: str, port: int, which: str = "") -> int:
    """The port, or a free one for 0, that could be bound a moment ago.

    `which` begins the names of its settings: "metrics-" for --metrics-port. Raises CannotListen
    with the system's reason, which gRPC keeps to itself.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    advice = f"another --{which}host may do"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no host has this name"
        raise CannotListen(f"can't listen on {address}: {reason}; {advice}") from error
    family, kind, protocol, _, where = found[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            bound: int = probe.getsockname()[1]
    except OSError as error:
        if error.errno in _TAKEN:  # another port helps only against another server
            advice = f"another --{which}port may do"
        raise CannotListen(f"can't listen on {address}: {error.strerror}; {advice}") from error
    return bound


def _check_apart(host: str, port: int, metrics_host: str, metrics_port: int) -> None:
    """Raises CannotListen when a server and its metrics are given the same address."""
    hosts = {host, metrics_host}
    if port == metrics_port != 0 and (len(hosts) == 1 or hosts & _ALL_HOSTS):
        raise CannotListen(
            f"--port and --metrics-port are both {port}, and a port takes one server; "
            "another --metrics-port may do"
        )


def _listen_unix(server: grpc.aio.Server, path: Path) -> str:
    check_socket_path(path)
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)  # with chmod afterwards, others could connect for a moment
    try:
        _add(server, f"unix:{utf8_path(path)}")
    finally:
        os.umask(mask)
    return f"unix:{utf8_path(path)}"


def check_socket_path(path: Path) -> None:
    """Raises CannotListen unless a server can make a socket there, or replace a dead one."""
    try:
        _check_name(path)
        _check_place(path)
    except UnicodeError as error:
        raise CannotListen(f"can't listen on {path}: the locale lacks its letters") from error
    except OSError as error:
        raise CannotListen(f"can't listen on {path}: {error.strerror}") from error


def _check_name(path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
        raise CannotListen(
            f"can't listen on {path}: the path of a socket has at most {_LONGEST_SOCKET_PATH} bytes"
        )
    if not _is_text(path):
        raise CannotListen(f"can't listen on {path}: its name is no UTF-8")
    if special := sorted(set(_SPECIAL_CHARACTERS) & set(str(path))):
        raise CannotListen(
            f"can't listen on {path}: gRPC's clients can't name a socket with {' '.join(special)}"
        )


def _check_place(path: Path) -> None:
    _check_nobody_listens(path)
    if not path.parent.is_dir():
        raise CannotListen(f"can't listen on {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise CannotListen(f"can't listen on {path}: no permission to write to {path.parent}")


def _is_text(path: Path) -> bool:
    try:
        return bool(utf8_path(path).encode())
    except UnicodeEncodeError:
        return False


def _add(server: grpc.aio.Server, address: str) -> int:
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(f"can't listen on {address}: is another process there?") from error
    if port == 0:
        raise CannotListen(f"can't listen on {address}")
    return port


def _check_nobody_listens(path: Path) -> None:
    """Raises CannotListen for anything in the way but a socket that nobody listens on."""
    if not path.exists():
        if path.is_symlink():
            raise CannotListen(f"can't listen on {path}: it is a link to nowhere")
        return
    if not path.is_socket():
        raise CannotListen(f"can't listen on {path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            pass  # a dead process left it behind
        except OSError as error:
            reason = error.strerror or "another process has it, and does not answer"
            raise CannotListen(f"can't listen on {path}: {reason}") from error
        else:
            raise CannotListen(f"can't listen on {path}: another process does")

"""Where a client connects, and in plain words why that failed.

The library tells causes only in texts, which change between releases. A text that is not known here
is passed on as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twinplane.errors import InvalidAddress
from twinplane.paths import expand_address

_TARGETS = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "vsock:", "xds:", "passthrough:")
"""Schemes that gRPC knows itself."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_MAX_PORT = 65535
_MAX_QUOTED_CHARACTERS = 300

_NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")

_SILENT = ("keepalive", "ping timeout")

_CAUSES = (
    ("Connection refused", "connection refused"),
    ("No such file or directory", "there is no such socket"),
    ("Permission denied", "permission denied"),
    ("No route to host", "no route to the host"),
    ("Network is unreachable", "the network is unreachable"),
    ("onnection timed out", "the connection timed out"),
    ("FD Shutdown", "the connection timed out"),
    ("Domain name not found", "no host has this name"),
    ("errors resolving", "the host's name can't be looked up"),
    ("DNS resolution failed", "the host's name can't be looked up"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC; a web server?"),
    ("http1.x server", "what listens there is a web server and does not speak gRPC"),
    ("WRONG_VERSION_NUMBER", "what listens there does not speak TLS"),
    ("CERTIFICATE_VERIFY_FAILED", "its TLS certificate is not trusted"),
    ("Hostname Verification Check failed", "its TLS certificate is for another host"),
    ("Failed to create security handshaker", "the TLS certificates or the key can't be used"),
    ("before receiving SETTINGS", "what listens there says nothing: no Twinplane, or it hangs"),
    *((part, "it fell silent") for part in _SILENT),
)
"""What the library says, and what that means; the first that fits."""

_CLOSED = ("Socket closed", "Connection reset by peer", "Broken pipe", "Stream removed", "EOF")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A control plane's address as gRPC takes it, and whether TLS is used."""

    address: str
    is_secure: bool

    def unavailable(self, text: str) -> str:
        """Why no answer came, from the library's text."""
        connected = not text.startswith(_NEVER_CONNECTED)
        cause = next((words for part, words in _CAUSES if part in text), None)
        if cause is None and any(part in text for part in _CLOSED):
            cause = "it was closed" if connected else self._refused_at_once()
        if connected and cause is None:  # a proxy's words, say
            return f"{self.address}: {_short(text)}"
        if connected:
            return f"the connection to {self.address} broke: {cause}"
        return f"no server answers at {self.address}: {cause or _short(text)}"

    def _refused_at_once(self) -> str:
        wants = "a TLS certificate of its clients" if self.is_secure else "TLS"
        return f"it closes connections at once; does it want {wants}?"


def has_broken(text: str) -> bool:
    """Whether a connection broke while its call ran, by the library's text of the failure."""
    broken = any(part in text for part in (*_CLOSED, *_SILENT))
    return broken and not text.startswith(_NEVER_CONNECTED)


def checked_address(address: str) -> str:
    """An address as gRPC takes it; `unix:~/path` is below the home folder.

    Raises InvalidAddress, NoHomeFolder, or TypeError.
    """
    if not isinstance(address, str):
        raise TypeError(f"address must be a string, not {type(address).__name__}")
    if not address.strip() or any(character.isspace() for character in address.split("/")[0]):
        raise InvalidAddress(f"the address {address!r} is not host:port")
    if address.startswith(_TARGETS):
        if not address.partition(":")[2].strip("/"):
            raise InvalidAddress(f"the address {address!r} names nothing behind its scheme")
        return expand_address(address)
    if (url := _URL.match(address)) is not None:
        rest = address[url.end() :].partition("/")[0] or "host:port"
        tls = " and credentials for TLS" if address.startswith("https") else ""
        raise InvalidAddress(f"the address {address!r} is a URL: give {rest}{tls}")
    _check_host_and_port(address)
    return address


def _check_host_and_port(address: str) -> None:
    if address.startswith("/"):
        raise InvalidAddress(f"the address {address!r} is a path: give unix:{address}")
    host, separator, port = address.rpartition(":")
    if not separator or "]" in port:
        raise InvalidAddress(f"the address {address!r} has no port: give {address}:50051, say")
    if host.count(":") and not (host.startswith("[") and host.endswith("]")):
        raise InvalidAddress(f"the address {address!r} is ambiguous: give [host]:port")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= _MAX_PORT):
        raise InvalidAddress(
            f"the address {address!r} is not host:port, with a port from 1 to {_MAX_PORT}"
        )
    if not host.strip("[]"):
        raise InvalidAddress(f"the address {address!r} has no host: give 127.0.0.1:{port}, say")


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _MAX_QUOTED_CHARACTERS else words[:_MAX_QUOTED_CHARACTERS] + "…"

"""Variables that Kubernetes sets in every container for every service of the namespace.

For a service called `twinplane-worker` with a port called `grpc` they are

    TWINPLANE_WORKER_SERVICE_HOST=10.96.0.7
    TWINPLANE_WORKER_SERVICE_PORT=50061
    TWINPLANE_WORKER_SERVICE_PORT_GRPC=50061
    TWINPLANE_WORKER_PORT=tcp://10.96.0.7:50061
    TWINPLANE_WORKER_PORT_50061_TCP=tcp://10.96.0.7:50061
    TWINPLANE_WORKER_PORT_50061_TCP_PROTO=tcp
    TWINPLANE_WORKER_PORT_50061_TCP_PORT=50061
    TWINPLANE_WORKER_PORT_50061_TCP_ADDR=10.96.0.7

Docker's links between containers have the last five, too. A service called `twinplane` gives
TWINPLANE_PORT, which is a setting as well: only the value tells one from the other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

_URL = re.compile(r"(?:tcp|udp|sctp)://(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]/]+)):(?P<port>\d+)")
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?")


def is_service_link(name: str, value: str) -> bool:
    """Whether a variable has the name and the value of a service link."""
    # Several kinds can have one name: a service may be called `twinplane-service`.
    return any(kind.fullmatch(name) and fits(value) for kind, fits in _KINDS)


def _is_host(value: str) -> bool:
    try:
        ipaddress.ip_address(value)
    except ValueError:
        return _HOST_NAME.fullmatch(value) is not None
    return True


def _is_port(value: str) -> bool:
    return value.isascii() and value.isdigit() and int(value) <= 65535


def _is_url(value: str) -> bool:
    match = _URL.fullmatch(value)
    return match is not None and _is_host(match["v6"] or match["host"]) and _is_port(match["port"])


def _is_protocol(value: str) -> bool:
    return value in ("tcp", "udp", "sctp")


_SERVICE = r"[A-Z][A-Z0-9_]*_"
_PORT = _SERVICE + r"PORT_\d+_(?:TCP|UDP|SCTP)"
_KINDS: tuple[tuple[re.Pattern[str], Callable[[str], bool]], ...] = (
    (re.compile(_SERVICE + "SERVICE_HOST"), _is_host),
    (re.compile(_SERVICE + "SERVICE_PORT(?:_[A-Z0-9_]+)?"), _is_port),
    (re.compile(_SERVICE + "PORT"), _is_url),
    (re.compile(_PORT), _is_url),
    (re.compile(_PORT + "_PROTO"), _is_protocol),
    (re.compile(_PORT + "_PORT"), _is_port),
    (re.compile(_PORT + "_ADDR"), _is_host),
)

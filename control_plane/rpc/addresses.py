"""What of a worker's address another worker can use."""

from __future__ import annotations

_SAME_MACHINE = "127.0.0.1"
_SCHEMES = ("dns:", "ipv4:", "ipv6:")


def rendezvous_address(given: str, worker: str) -> str:
    """Where ranks meet at a worker that says `given` of itself; empty where they don't.

    A worker that leaves its host open is reached by others as we reach it at `worker`. A Unix
    socket is on this machine, as all who meet there are then.
    """
    host, _, port = given.rpartition(":")
    return given if host or not port else f"{_host_of(worker)}:{port}"


def _host_of(address: str) -> str:
    """The host in an address that gRPC takes: host:port, dns://server/host:port or unix:PATH."""
    if address.startswith("unix:"):
        return _SAME_MACHINE
    name = address.rpartition("/")[2].rpartition(":")[0]
    for scheme in _SCHEMES:
        name = name.removeprefix(scheme)
    return name

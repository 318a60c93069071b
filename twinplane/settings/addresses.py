"""Addresses of workers, as settings and lists name them."""

from __future__ import annotations

from collections.abc import Iterable

from twinplane.paths import expand_address


def parse_replicas(given: Iterable[str]) -> tuple[str, ...]:
    """Each replica's address, or the addresses of its ranks with commas between; `~` is expanded.

    Raises ValueError for what is no address, and for one that is named twice.
    """
    replicas = tuple(",".join(map(expand_address, replica.split(","))) for replica in given)
    seen: set[str] = set()
    for address in (address for replica in replicas for address in replica.split(",")):
        if not _is_address(address):
            raise ValueError(f"worker must be host:port or unix:PATH, not {address!r}")
        if address in seen:
            raise ValueError(f"worker names {address} twice")
        seen.add(address)
    return replicas


def parse_named(given: str) -> tuple[str, int]:
    """The host and the port of a name that resolves to workers. Raises ValueError."""
    host, _, port = given.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if "/" in host or given.startswith("unix:") or not _is_address(given):
        raise ValueError(f"workers_dns must be host:port, not {given!r}")
    return host, int(port)


def _is_address(worker: str) -> bool:
    """Whether gRPC would connect to what is meant: it takes 443 for a port that is missing."""
    if worker.startswith("unix:"):
        return worker != "unix:"
    host, _, port = worker.rpartition(":")
    if "://" in host and not host.startswith("dns://"):
        return False
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535

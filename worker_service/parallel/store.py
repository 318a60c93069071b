"""The store in which ranks leave each other their addresses: the first rank keeps it, for life."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.load_errors import RendezvousUnavailable

_POLL_SECONDS = 0.01
_KNOCK_SECONDS = 1.0
_CALL_TIMEOUT = timedelta(seconds=10)
_BACKLOG = 128


class StoreHost:
    """A listening store. It lives as long as this object, through any number of epochs."""

    def __init__(self, host: str, port: int) -> None:
        """Listens at `host` only; port 0 takes any free one. Raises RendezvousUnavailable."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise RendezvousUnavailable(
                f"the other ranks can't meet at {host}:{port}: {error.strerror or error}"
            ) from error
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=_CALL_TIMEOUT,
            master_listen_fd=listener.detach(),
        )

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def meet(
    rendezvous: Rendezvous, rank: int, names: Sequence[str], check: Callable[[], None]
) -> TCPStore:
    """Connects to the rendezvous' store and waits until every one of the ranks `names` is there.

    `check` is called every few milliseconds and raises what ends the wait. Raises GroupLost where
    they don't all come in time.
    """
    deadline = time.monotonic() + rendezvous.timeout_seconds
    store = connect(rendezvous, deadline, check)
    try:
        store.set(f"{rendezvous.key}/{names[rank]}", "here")
        missing = list(names)
        while missing := [name for name in missing if not _is_there(store, rendezvous, name)]:
            check()
            if time.monotonic() > deadline:
                raise GroupLost(f"{_listed(missing)} did not come to {_place(rendezvous)}")
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:
        raise GroupLost(
            f"the store at {_place(rendezvous)} is gone: {first_line(error)}"
        ) from error
    return store


def local_address(rendezvous: Rendezvous) -> str:
    """The address of this host from which the rendezvous is reached. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def first_line(error: BaseException) -> str:
    """What a library of C++ says, without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def connect(rendezvous: Rendezvous, deadline: float, check: Callable[[], None]) -> TCPStore:
    """A connection to the rendezvous' store, once it listens; `check` as in meet. Raises GroupLost.

    Asks for a plain connection first: torch tells standard error of each one that fails, can't
    be interrupted, and may wait for a name server."""
    while True:
        check()
        try:
            address = (rendezvous.host, rendezvous.port)
            socket.create_connection(address, _KNOCK_SECONDS).close()
            return TCPStore(
                rendezvous.host,
                rendezvous.port,
                is_master=False,
                wait_for_workers=False,
                timeout=_CALL_TIMEOUT,
            )
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                raise GroupLost(
                    f"no store answers at {_place(rendezvous)}: {first_line(error)}"
                ) from error
        time.sleep(_POLL_SECONDS)


def _is_there(store: Store, rendezvous: Rendezvous, name: str) -> bool:
    return bool(store.check([f"{rendezvous.key}/{name}"]))


def _place(rendezvous: Rendezvous) -> str:
    return f"{rendezvous.host}:{rendezvous.port}"


def _listed(names: Sequence[str]) -> str:
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names)

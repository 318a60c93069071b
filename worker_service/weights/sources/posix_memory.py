"""POSIX shared memory, read like a file.

It is not mapped: whoever made it may make it smaller at any time, and touching a page that is gone
would end the worker.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.weights.sources.interface import Check, bytes_of

# Where Linux has what shm_open opens. multiprocessing.shared_memory would unlink it at its end.
_FOLDER = Path("/dev/shm")
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SLICE_BYTES = 1 << 24
_NAME = "update.ipc.posix.name"


class PosixReader:
    """ipc.SharedMemory of an open descriptor."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor

    def read(self, offset: int, into: torch.Tensor, check: Check) -> None:
        """See SharedMemory."""
        data = bytes_of(into).data
        done = 0
        while done < len(data):
            check()
            part = data[done : done + _SLICE_BYTES]
            try:
                count = os.preadv(self._descriptor, [part], offset + done)
            except OSError as error:
                raise SourceLost(f"{self._name} can't be read: {error.strerror}") from error
            if not count:
                raise SourceLost(f"{self._name} ended at byte {offset + done} meanwhile")
            done += count


@contextmanager
def opened(name: str, byte_count: int) -> Iterator[PosixReader]:
    """The memory of this name, neither changed nor unlinked. Raises UpdateInvalid where there is
    none that this process may read, or another size than was said."""
    try:
        descriptor = os.open(_FOLDER / name[1:], _FLAGS)
    except OSError as error:
        raise UpdateInvalid(_NAME, f"{name!r} can't be opened: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UpdateInvalid(_NAME, f"{name!r} is no shared memory")
        page = os.sysconf("SC_PAGE_SIZE")
        if not byte_count <= status.st_size < byte_count + page:
            raise UpdateInvalid(
                "update.ipc.byte_count", f"{name!r} has {status.st_size} bytes, not {byte_count}"
            )
        yield PosixReader(name, descriptor)
    finally:
        os.close(descriptor)

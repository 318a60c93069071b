"""Why a model cannot be loaded. No torch here, so that the application can report these.

LoadError
├── CheckpointInvalid      a file is missing, unreadable or does not fit the others
├── ModelUnsupported       the folder is sound, but asks for something this worker cannot do
├── MemoryBudgetTooSmall   the KV pool cannot hold what was asked for
├── KVPoolTooLarge         the machine does not give that much memory
├── RanksUnfit             the model can't be split over that many ranks
├── RendezvousUnavailable  the ranks of the replica can't meet at that address
├── OutOfMemory            the machine or device has, or gives, too little for the rest
├── DeviceFailed           the device is there, and fails
└── ExecutorUnavailable    no executor, or not the one asked for, can run the model here
"""

from __future__ import annotations

_SHOWN_LENGTH = 80


class LoadError(Exception):
    """The worker cannot start with these options; the message says what to do about it."""


class CheckpointInvalid(LoadError):
    """A model folder is incomplete or broken."""


class ModelUnsupported(LoadError):
    """`setting` has a `value` outside what is `supported`."""

    def __init__(self, setting: str, value: object, supported: str) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN_LENGTH:
            shown = f"{shown[:_SHOWN_LENGTH]}…"
        super().__init__(f"{setting} {shown} is not supported; supported: {supported}")
        self.setting = setting
        self.value = value


class MemoryBudgetTooSmall(LoadError):
    """The KV pool's bytes do not suffice."""


class KVPoolTooLarge(LoadError):
    """The host refuses the KV pool's memory."""


class OutOfMemory(LoadError):
    """Weights, rows or a step's buffers do not fit in the memory of the machine or device."""


class DeviceFailed(LoadError):
    """The device can't be used, or is gone."""


class ExecutorUnavailable(LoadError):
    """Every executor that was considered has refused, or none has that name."""


class RanksUnfit(LoadError):
    """The model has too few of something to give each rank a part."""


class RendezvousUnavailable(LoadError):
    """The first rank can't listen where the others would come."""

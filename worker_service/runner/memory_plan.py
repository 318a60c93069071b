"""What a load will take of the memory, and whether that is there: known before weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from worker_service.device_errors import is_device_lost, is_out_of_memory, one_line
from worker_service.domain.capability import Limits
from worker_service.host_memory import host_memory
from worker_service.load_errors import DeviceFailed, KVPoolTooLarge, LoadError, OutOfMemory

# A row's entries that do not grow with its length: see RequestState and SamplingState.
_ROW_BYTES = 70
_INFLIGHT_STEP_BYTES = 12
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that a load can draw on: `name` completes "on …". `total_bytes` is all that there is
    for this process, `free_bytes` what is not in use now."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what they are for. The device is the host where it is a CPU.

    Weights, KV, workspace (the buffers of the largest step) and adapters are on the device, rows
    (the tokens and block tables of sequences) on the host. `number_format` is the weights';
    `smaller_formats` are flags that make them smaller.
    """

    device: Memory
    host: Memory
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    rows_bytes: int
    number_format: str
    smaller_formats: Sequence[str] = ()
    adapters_bytes: int = 0

    @property
    def is_on_host(self) -> bool:
        return self.device == self.host

    @property
    def device_bytes(self) -> int:
        """All that it takes of the device."""
        rows = self.rows_bytes if self.is_on_host else 0
        models = self.weights_bytes + self.adapters_bytes
        return models + self.kv_bytes + self.workspace_bytes + rows

    @property
    def missing_bytes(self) -> int:
        """What is not free now of all that it takes of the device; 0 where all is free."""
        return max(0, self.device_bytes - self.device.free_bytes)

    def describe(self) -> str:
        """One line for people."""
        parts = (
            ("weights", self.weights_bytes),
            ("KV", self.kv_bytes),
            ("workspace", self.workspace_bytes),
            ("rows", self.rows_bytes),
            *((("adapters", self.adapters_bytes),) if self.adapters_bytes else ()),
        )
        sizes = " + ".join(f"{name} {in_units(size)}" for name, size in parts)
        return f"{sizes}, with {in_units(self.device.free_bytes)} free on {self.device.name}"

    def require_room(self) -> None:
        """Raises OutOfMemory or KVPoolTooLarge, which says what is short and which flag helps,
        where a part alone is more than there is.

        A host gives memory when it is first written, and can swap: all parts together may exceed
        what is free there. A GPU has to have all of it free.
        """
        require_weights(
            self.weights_bytes, self.device, self.host, self.number_format, self.smaller_formats
        )
        require_rows(self.rows_bytes, self.host)
        pool, steps = "--kv-cache-memory-bytes", "--max-num-batched-tokens or --max-num-seqs"
        require("the KV pool takes", self.kv_bytes, self.device, _less_by(pool), KVPoolTooLarge)
        require("the buffers of a step take", self.workspace_bytes, self.device, _less_by(steps))
        slots = "--max-loras or --max-lora-rank"
        require("the adapters' slots take", self.adapters_bytes, self.device, _less_by(slots))
        if not self.is_on_host and self.missing_bytes:
            adapters = (
                f", adapters ({in_units(self.adapters_bytes)})" if self.adapters_bytes else ""
            )
            raise OutOfMemory(
                f"weights ({in_units(self.weights_bytes)}){adapters}, the KV pool "
                f"({in_units(self.kv_bytes)}) and the buffers of a step "
                f"({in_units(self.workspace_bytes)}) take {in_units(self.missing_bytes)} more than "
                f"the {in_units(self.device.free_bytes)} that are free on {self.device.name}: "
                f"{_less_by(pool)}, or by {steps}"
            )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raises OutOfMemory for an error that says that memory has run out: with the plan and the
        flags that help. Raises DeviceFailed for one that says that the device is gone."""
        try:
            yield
        except Exception as error:
            if is_device_lost(error):
                raise DeviceFailed(
                    f"{self.device.name} failed ({one_line(error)}): see whether nvidia-smi shows "
                    "it, or start with --device cpu"
                ) from error
            if not is_out_of_memory(error):
                raise
            flags = ("--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens")
            smaller = "".join(f", or give {each}" for each in self.smaller_formats)
            raise OutOfMemory(
                f"{self.device.name} ran out of memory ({one_line(error)}); the plan was "
                f"{self.describe()}: give less by {', '.join(flags)}{smaller}, or stop what else "
                "uses the memory"
            ) from error


def require_weights(
    weights_bytes: int,
    device: Memory,
    host: Memory,
    number_format: str,
    smaller_formats: Sequence[str] = (),
) -> None:
    """Raises OutOfMemory where the weights alone are more than the host has, or than is free on a
    GPU."""
    what = f"the weights in {number_format} take"
    smaller = "".join(f"give {each}, or " for each in smaller_formats)
    if device == host:
        require(what, weights_bytes, host, f"{smaller}serve a smaller model")
    elif weights_bytes >= device.free_bytes:
        raise OutOfMemory(
            f"{what} {in_units(weights_bytes)} and leave no room in the "
            f"{in_units(device.free_bytes)} that are free on {device.name}: stop what else uses "
            f"it, {smaller}serve a smaller model"
        )


def this_machine() -> Memory:
    """The memory of the host, within its container's limit."""
    memory = host_memory()
    return Memory("this machine", memory.total_bytes, memory.available_bytes)


def bytes_of_rows(limits: Limits, block_size: int) -> int:
    """What RequestState and SamplingState take for all rows."""
    length = limits.max_sequence_token_count
    numbers = length + -(-length // block_size)
    fixed = _ROW_BYTES + _INFLIGHT_STEP_BYTES * limits.max_inflight_step_count
    return limits.max_sequence_count * (4 * numbers + fixed)


def require_rows(rows_bytes: int, host: Memory) -> None:
    """Raises OutOfMemory where the host has less than the rows take."""
    advice = _less_by("--max-num-seqs or --max-model-len")
    require("rows for that many sequences of that length take", rows_bytes, host, advice)


def in_units(size: int) -> str:
    """Bytes for people: 538 MB, 1.07 GB."""
    value, unit = float(size), 0
    while value >= 999.5 and unit + 1 < len(_UNITS):
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}" if value < 999.5 else f"{value:.0f} {_UNITS[unit]}"


def require(
    what: str,
    size: int,
    memory: Memory,
    advice: str,
    error: type[LoadError] = OutOfMemory,
) -> None:
    """Raises the error where `what`, a subject with its verb, is more than the memory has in all.
    `advice` says what to do."""
    if size > memory.total_bytes:
        raise error(
            f"{what} {in_units(size)}, {in_units(size - memory.total_bytes)} more than "
            f"{memory.name} has: {advice}"
        )


def _less_by(flags: str) -> str:
    return f"give less by {flags}"

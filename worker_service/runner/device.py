"""Devices: which one a worker takes, what it is called, and what memory it has."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from worker_service.domain.capability import DataType, Device, DeviceKind
from worker_service.load_errors import LoadError
from worker_service.runner.memory_plan import Memory, require_weights, this_machine
from worker_service.runner.options import Quantization

_CPU_KV_BYTES = 1 << 30
# The fraction of what the weights leave. The rest is for activations and the allocator.
_CUDA_KV_FRACTION = 0.85


def available_device() -> str:
    """ "cuda" where torch finds a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def open_device(name: str) -> torch.device:
    """The torch device of a name: cpu, cuda or cuda:N. Raises LoadError if it is not here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise LoadError(f"there is no device {name!r}; use cpu or cuda") from error
    match device.type:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            index = device.index or 0
            if index >= torch.cuda.device_count():
                raise LoadError(
                    f"there is no device {name!r} here: torch {torch.__version__} "
                    f"{_what_torch_sees()}; start with --device cpu, or {_next_step()}"
                )
            return torch.device("cuda", index)
        case _:
            raise LoadError(f"device {name!r} is not supported; use cpu or cuda")


def own_device(device: torch.device) -> None:
    """Makes a GPU what this thread means where it names none. Without that, what asks for "the
    current device" would take memory of the first GPU, which is another rank's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _what_torch_sees() -> str:
    if not _is_built_for_gpus():
        return "is a build without CUDA"
    count = torch.cuda.device_count()
    return f"sees {count} CUDA device{'' if count == 1 else 's'}"


def _next_step() -> str:
    if not _is_built_for_gpus():
        return "install a build of torch with CUDA"
    return "see whether nvidia-smi and CUDA_VISIBLE_DEVICES show a GPU"


def _is_built_for_gpus() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def describe_device(device: torch.device) -> Device:
    """The device as the contract names it."""
    if device.type == "cuda":
        index = device.index or 0
        return Device(DeviceKind.CUDA, torch.cuda.get_device_name(index), index)
    return Device(DeviceKind.CPU, _processor_name())


def memory_of(device: torch.device) -> Memory:
    """The memory of the GPU, or that of the host."""
    if device.type != "cuda":
        return this_machine()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Memory(str(device), int(total_bytes), int(free_bytes))


def default_kv_cache_bytes(
    device: torch.device, data_type: DataType, weights_bytes: int, sharers: int = 1
) -> int:
    """Bytes for the KV pool of a model that is not loaded yet; on a CPU the share of one of
    `sharers` workers. Raises OutOfMemory where the weights leave nothing of a GPU's free memory."""
    if device.type == "cpu":
        return _CPU_KV_BYTES // sharers
    memory = memory_of(device)
    smaller = smaller_formats(device, getattr(torch, data_type.value), Quantization.NONE)
    require_weights(weights_bytes, memory, this_machine(), data_type.value, smaller)
    return int((memory.free_bytes - weights_bytes) * _CUDA_KV_FRACTION)


def smaller_formats(
    device: torch.device, data_type: torch.dtype, quantization: Quantization
) -> tuple[str, ...]:
    """The flags by which the weights would take less there."""
    if data_type is not torch.float32 or quantization is not Quantization.NONE:
        return ()
    return ("--dtype bfloat16", *(("--quantization int8",) if device.type == "cpu" else ()))


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

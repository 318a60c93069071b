"""Devices: which one a worker takes, what it is called, and how much of its memory is free."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from worker_service.domain.capability import Device, DeviceKind
from worker_service.load_errors import LoadError, MemoryBudgetTooSmall

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


def free_bytes(device: torch.device) -> int:
    """Free memory: the GPU's, or the host's free pages."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def default_kv_cache_bytes(
    device: str, model_folder: Path, sharers: int = 1, rank_count: int = 1
) -> int:
    """Bytes for the KV pool of a model that is not loaded yet; on a CPU the share of one of
    `sharers` workers. A rank has about as much of the weights as each of the other ranks. Raises
    MemoryBudgetTooSmall where its part of the weights' files leaves nothing of a GPU's free memory.
    """
    if device == "cpu":
        return _CPU_KV_BYTES // sharers
    free_bytes, _ = torch.cuda.mem_get_info()
    files_bytes = sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))
    weights_bytes = files_bytes / rank_count
    if weights_bytes >= free_bytes:
        raise MemoryBudgetTooSmall(
            f"{weights_bytes / 1e9:.1f} GB of weights leave no room for KV in the "
            f"{free_bytes / 1e9:.1f} GB that are free on the GPU: stop what else uses it, serve a "
            "smaller model or, if --dtype makes the weights smaller than their files, give "
            "--kv-cache-memory-bytes"
        )
    return int((free_bytes - weights_bytes) * _CUDA_KV_FRACTION)


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

"""Which device a worker takes when it is not told, and how much of its memory the KV pool gets."""

from __future__ import annotations

from pathlib import Path

import torch

_CPU_KV_BYTES = 1 << 30
# Of what the weights leave: the rest is for activations and the allocator.
_CUDA_KV_FRACTION = 0.85


def available_device() -> str:
    """ "cuda" where torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_kv_cache_bytes(device: str, model_folder: Path) -> int:
    """Bytes for the KV pool of a model that is not loaded yet."""
    if device == "cpu":
        return _CPU_KV_BYTES
    free_bytes, _ = torch.cuda.mem_get_info()
    weights_bytes = sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))
    return int(max(0, free_bytes - weights_bytes) * _CUDA_KV_FRACTION)

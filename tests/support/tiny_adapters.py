"""Random adapters in PEFT's format for any model, and how a runner gets them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from worker_service.domain.adapters import Adapter, LoadedAdapter
from worker_service.runner.adapters import AdapterSlots
from worker_service.weights.adapter_reader import (
    CONFIG_NAME,
    TENSORS_NAME,
    Modules,
    read_adapter,
)

PREFIX = "base_model.model."
PLAIN: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": "all-linear",
}
Change = Callable[[str, torch.Tensor], torch.Tensor]


def tensors_of(
    modules: Modules, rank: int = 4, seed: int = 0, size: float = 0.3
) -> dict[str, torch.Tensor]:
    """Both matrices of each module."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (outputs, inputs) in sorted(modules.items()):
        for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            numbers = size * torch.randn(shape, generator=generator)
            tensors[f"{PREFIX}{module}.lora_{end}.weight"] = numbers
    return tensors


def save_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] = PLAIN
) -> Path:
    """Writes the folder as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    save_file(dict(tensors), folder / TENSORS_NAME)
    return folder


def load(slots: AdapterSlots, slot: int, folder: Path) -> LoadedAdapter:
    """Puts the adapter of a folder into a slot."""
    adapter = read(slots, folder)
    slots.prepare(adapter)
    return slots.put(slot, adapter)


def read(slots: AdapterSlots, folder: Path) -> Adapter:
    return read_adapter(folder, slots.modules, slots.limits)

"""From an adapter's bytes to torch's tensors, as an executor's slots take them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from worker_service.domain.adapters import Adapter, StoredTensor
from worker_service.kernels.low_rank import LowRank
from worker_service.runner.executor import AdapterMemory

_DATA_TYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


class TensorSlots:
    """runner.adapters.SlotMemory over an executor's."""

    def __init__(self, memory: AdapterMemory) -> None:
        self._memory = memory

    @property
    def byte_count(self) -> int:
        return self._memory.byte_count

    def prepare(self, adapter: Adapter) -> None:
        self._memory.prepare(
            {
                name: LowRank(_tensor(pair.a), _tensor(pair.b), pair.scale)
                for name, pair in adapter.modules.items()
            }
        )

    def put(self, slot: int) -> int:
        return self._memory.put(slot)

    def clear(self, slot: int) -> None:
        self._memory.clear(slot)


def _tensor(stored: StoredTensor) -> torch.Tensor:
    """A view of its bytes."""
    description = stored.description
    data_type = _DATA_TYPES[description.number_format]
    return torch.frombuffer(stored.data, dtype=data_type).view(description.shape)

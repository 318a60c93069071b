"""One opened context per instruction set of this CPU, and buffers whose edges are watched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from worker_service.kernels.cpu.compiler import default_cache, ensure_library
from worker_service.kernels.cpu.library import Context, InstructionSet
from worker_service.kernels.cpu.ops import CpuKernels

GUARD = 64
SENTINEL = -12345.5

Opener = Callable[[int, InstructionSet | None], CpuKernels]


@pytest.fixture(scope="session")
def open_cpu() -> Iterator[Opener]:
    """Opens kernels by (threads, instruction set), each combination once."""
    opened: dict[tuple[int, InstructionSet | None], CpuKernels] = {}

    def opener(threads: int, instruction_set: InstructionSet | None) -> CpuKernels:
        key = (threads, instruction_set)
        if key not in opened:
            path = ensure_library(default_cache(os.environ), lambda line: None, os.environ)
            opened[key] = CpuKernels(Context(path, threads, instruction_set))
        return opened[key]

    yield opener
    for kernels in opened.values():
        kernels.close()


@pytest.fixture(scope="session", params=list(InstructionSet), ids=lambda each: each.name.lower())
def cpu(request: pytest.FixtureRequest, open_cpu: Opener) -> CpuKernels:
    """Two threads, once per instruction set that this CPU has."""
    wanted: InstructionSet = request.param
    if wanted not in open_cpu(2, None).context.head_dim_multiples:
        pytest.skip(f"this CPU lacks {wanted.name}")
    return open_cpu(2, wanted)


@pytest.fixture(scope="session")
def alone(cpu: CpuKernels, open_cpu: Opener) -> CpuKernels:
    """One thread with the instruction set of `cpu`."""
    return open_cpu(1, cpu.context.instruction_set)


@dataclass(slots=True)
class Buffers:
    """Outputs filled with NaN between guard zones."""

    _made: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def poisoned(self, *shape: int) -> torch.Tensor:
        """A float32 tensor of NaN with GUARD sentinels before and behind it."""
        count = int(torch.Size(shape).numel())
        whole = torch.full((count + 2 * GUARD,), SENTINEL)
        self._made.append((whole, count))
        inner = whole[GUARD : GUARD + count]
        inner.fill_(float("nan"))
        return inner.view(shape)

    def check(self) -> None:
        """No guard was overwritten and no output left out."""
        for whole, count in self._made:
            assert torch.all(whole[:GUARD] == SENTINEL), "written before the buffer"
            assert torch.all(whole[GUARD + count :] == SENTINEL), "written behind the buffer"
            assert not torch.isnan(whole[GUARD : GUARD + count]).any(), "an element was not written"


@pytest.fixture(scope="session")
def buffers() -> Callable[[], Buffers]:
    """Makes a fresh set of watched buffers."""
    return Buffers

"""The name of a worker's arithmetic: equal names and equal weight digests round alike.

The weight digest covers the formats (docs/adr/0007). This name covers the rest: what computes, on
which kind of device, from which build and for which instruction set.
"""

from __future__ import annotations

import torch

from worker_service.domain.capability import RankCoordinates
from worker_service.runner.executor import Executor, ExecutorType

# To be raised when code of ours outside the kernels comes to round otherwise: layers in torch, rope
# tables, the sampler.
_REVISION = 1


def arithmetic_name(
    device: torch.device,
    kind: ExecutorType,
    executor: Executor,
    ranks: RankCoordinates | None = None,
) -> str:
    """For people too; it says nothing about the model, whose digest stands beside it.

    Tensor ranks add terms that one rank adds in another order. Stages only hand on.
    """
    split = "" if ranks is None or ranks.tensor[1] == 1 else f"{ranks.tensor[1]} tensor ranks"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    else:
        where = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    parts = (str(kind), executor.build, f"torch {torch.__version__}", where, split, f"r{_REVISION}")
    return ", ".join(filter(None, parts))

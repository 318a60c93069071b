"""Which executor runs: the first in order that can, or the one that was named."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from twinplane.process.logs import fields
from worker_service.attention.reference import REFERENCE
from worker_service.attention.torch_backend import TORCH
from worker_service.load_errors import ExecutorUnavailable
from worker_service.runner.compiled_executor import COMPILED
from worker_service.runner.executor import ExecutorConfig, ExecutorType
from worker_service.runner.torch_executor import torch_executor

_logger = logging.getLogger(__name__)

EXECUTORS: tuple[ExecutorType, ...] = (COMPILED, torch_executor(TORCH), torch_executor(REFERENCE))


def select_executor(
    config: ExecutorConfig,
    name: str | None,
    attention_backend: str | None,
    candidates: Sequence[ExecutorType] = EXECUTORS,
) -> ExecutorType:
    """The first candidate of that name and attention backend that its probe lets run here. None
    stands for any name or backend.

    Every refusal is logged with its reason. Raises ExecutorUnavailable when none is left.
    """
    considered = [
        kind
        for kind in candidates
        if name in (None, kind.name) and attention_backend in (None, kind.attention_backend)
    ]
    if not considered:
        raise ExecutorUnavailable(_unknown(name, attention_backend, candidates))
    refusals = []
    for kind in considered:
        reason = kind.probe(config)
        if reason is None:
            _logger.info("executor chosen", extra=fields(executor=str(kind)))
            return kind
        _logger.warning("executor refused", extra=fields(executor=str(kind), refusal=reason))
        refusals.append(f"{kind}: {reason}")
    raise ExecutorUnavailable(f"no executor can run here ({'; '.join(refusals)})")


def _unknown(
    name: str | None, attention_backend: str | None, candidates: Sequence[ExecutorType]
) -> str:
    names = list(dict.fromkeys(kind.name for kind in candidates))
    if name is not None and name not in names:
        return f"there is no executor {name!r}; there are: {', '.join(names)}"
    backends = [kind.attention_backend for kind in candidates if kind.attention_backend is not None]
    if attention_backend in names and attention_backend not in backends:
        return (
            f"{attention_backend!r} is an executor, not an attention backend: "
            f"say --executor {attention_backend}"
        )
    if attention_backend in backends:
        return f"the executor {name!r} has its own attention: leave --attention-backend away"
    return f"there is no attention backend {attention_backend!r}; there are: {', '.join(backends)}"

"""Which forward pass runs: the first in order that can, or the one that was named."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from twinplane.process.logs import fields
from worker_service.attention.reference import REFERENCE
from worker_service.attention.torch_backend import TORCH
from worker_service.load_errors import BackendUnavailable
from worker_service.runner.compiled_pass import COMPILED
from worker_service.runner.forward_pass import PassConfig, PassType
from worker_service.runner.torch_pass import torch_pass

_logger = logging.getLogger(__name__)

PASSES: tuple[PassType, ...] = (COMPILED, torch_pass(TORCH), torch_pass(REFERENCE))


def select_pass(
    config: PassConfig, name: str | None, candidates: Sequence[PassType] = PASSES
) -> PassType:
    """The pass `name`, or with None the first candidate whose probe finds nothing against it.

    Every refusal is logged with its reason. Raises BackendUnavailable when none is left.
    """
    considered = [kind for kind in candidates if name is None or kind.name == name]
    if not considered:
        known = ", ".join(kind.name for kind in candidates)
        raise BackendUnavailable(f"there is no attention backend {name!r}; there are: {known}")
    refusals = []
    for kind in considered:
        reason = kind.probe(config)
        if reason is None:
            _logger.info("attention backend chosen", extra=fields(backend=kind.name))
            return kind
        _logger.warning(
            "attention backend refused", extra=fields(backend=kind.name, refusal=reason)
        )
        refusals.append(f"{kind.name}: {reason}")
    raise BackendUnavailable(f"no attention backend can run here ({'; '.join(refusals)})")

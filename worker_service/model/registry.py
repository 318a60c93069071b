"""From a config.json to a spec: the family that its architecture names describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader
from worker_service.model.families import FAMILIES
from worker_service.model.spec import DecoderSpec


def describe(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json of transformers 4 or 5 describes.

    Raises ModelUnsupported for what this worker cannot run, CheckpointInvalid for what no worker
    could.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointInvalid("config.json: architectures must name one architecture")
    (name,) = names
    for family in FAMILIES:
        if family.architecture == name:
            break
    else:
        supported = ", ".join(family.architecture for family in FAMILIES)
        raise ModelUnsupported("architecture", name, supported)
    for key in ("quantization_config", "compression_config"):
        settings = config.get(key)
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            raise ModelUnsupported(key, method or settings, "weights that are not quantized")
    return family.describe(ConfigReader(config))

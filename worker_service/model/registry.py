"""From a config.json to a spec: the family that its architecture names describes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader, contradiction
from worker_service.model.families import FAMILIES, Family
from worker_service.model.spec import DecoderSpec

# A model of several parts keeps its decoder's facts under one of these.
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config", "decoder")


def describe(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a config.json of transformers 4 or 5 describes.

    Raises ModelUnsupported for what this worker cannot run, CheckpointInvalid for what no worker
    could.
    """
    family = _family(config)
    for key in ("quantization_config", "compression_config", "quantization"):
        settings = config.get(key)
        if settings is not None:
            method = settings.get("quant_method") if isinstance(settings, dict) else None
            raise ModelUnsupported(key, method or settings, "weights that are not quantized")
    for key in _PARTS:
        if config.get(key) is not None:
            raise ModelUnsupported(key, "an object", "a decoder's facts at the top of config.json")
    if config.get("per_layer_config") is not None:
        raise ModelUnsupported("per_layer_config", "an object", "the same facts for all layers")
    return family.describe(ConfigReader(config))


def _family(config: Mapping[str, Any]) -> Family:
    """The family that `architectures` names, or `model_type` where there are none."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if names is None and model_type is not None:
        for family in FAMILIES:
            if family.model_type == model_type:
                return family
        supported = ", ".join(family.model_type for family in FAMILIES)
        raise ModelUnsupported("model_type", model_type, supported)
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointInvalid("config.json: architectures must name one architecture")
    for family in FAMILIES:
        if family.architecture == names[0]:
            if model_type not in (None, family.model_type):
                raise contradiction("architectures", names, "model_type", model_type)
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ModelUnsupported("architecture", names[0], supported)

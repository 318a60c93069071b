"""The families: one file each turns a config.json into a DecoderSpec.

A family is added by its file and its place in FAMILIES.
"""

from __future__ import annotations

from worker_service.model.families.family import Family
from worker_service.model.families.llama import LLAMA
from worker_service.model.families.mistral import MISTRAL
from worker_service.model.families.qwen2 import QWEN2

__all__ = ["FAMILIES", "Family"]

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2)

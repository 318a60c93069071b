"""What a family is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker_service.model.config import ConfigReader
from worker_service.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one `architecture` and `model_type`, named as config.json names them.

    `describe` reads the config. It raises ModelUnsupported for what this worker cannot run, and
    CheckpointInvalid for what no worker could.
    """

    architecture: str
    model_type: str
    describe: Callable[[ConfigReader], DecoderSpec]

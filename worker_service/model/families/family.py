"""What a family is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from worker_service.model.config import ConfigReader
from worker_service.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one `architecture`, named as config.json names it.

    `describe` reads the config. It raises ModelUnsupported for what this worker cannot run, and
    CheckpointInvalid for what no worker could.
    """

    architecture: str
    describe: Callable[[ConfigReader], DecoderSpec]

"""Which class runs which architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch

from worker_service.model.config import Architecture, ModelConfig
from worker_service.model.interface import Model
from worker_service.model.llama import LlamaModel
from worker_service.model.loader import WeightLoader
from worker_service.weights.checkpoint import Checkpoint


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    max_length: int,
    data_type: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
) -> Model:
    """Builds the checkpoint's model for sequences of up to `max_length` tokens.

    Raises CheckpointInvalid when the weights do not fit the config.
    """
    loader = WeightLoader(checkpoint, data_type, device)
    match config.architecture:
        case Architecture.LLAMA | Architecture.MISTRAL | Architecture.QWEN2:
            return LlamaModel(config, loader, max_length, data_type, device, progress)
        case _:
            assert_never(config.architecture)

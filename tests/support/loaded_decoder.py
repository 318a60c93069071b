"""A decoder from a model folder, driven without a runner, for its logits at every position."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_llama import MAX_LENGTH
from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import DataType, Limits
from worker_service.model.accounting import account_for
from worker_service.model.loader import WeightLoader
from worker_service.model.registry import describe
from worker_service.model.spec import DecoderSpec
from worker_service.runner.executor import ExecutorConfig, ExecutorType
from worker_service.runner.kv_cache import KVCache, layer_groups
from worker_service.runner.options import Quantization
from worker_service.runner.selection import EXECUTORS
from worker_service.weights.checkpoint import Checkpoint

BLOCK_SIZE = 8
TORCH_EXECUTOR = EXECUTORS[1]


class Loaded:
    """A model from a folder with one sequence's cache, driven without a runner.

    Its blocks hold NaN where nothing is written, if the executor promises not to look there.
    """

    def __init__(
        self,
        folder: Path,
        kind: ExecutorType = TORCH_EXECUTOR,
        spec: DecoderSpec | None = None,
        peers: Any = None,
        adapter_limits: AdapterLimits | None = None,
    ) -> None:
        """The folder's config describes the model where there is no `spec`. With `peers` this is
        one of several ranks."""
        self._adapter_limits = adapter_limits or AdapterLimits()
        with torch.inference_mode(), Checkpoint(folder) as checkpoint:
            spec = account_for(checkpoint, spec or describe(checkpoint.config))
            self._load(spec, checkpoint, kind, peers)

    def _load(
        self, spec: DecoderSpec, checkpoint: Checkpoint, kind: ExecutorType, peers: Any
    ) -> None:
        device = torch.device("cpu")
        self.block_count = MAX_LENGTH // BLOCK_SIZE
        config = ExecutorConfig(
            spec=spec,
            device=device,
            data_type=torch.float32,
            quantization=Quantization.NONE,
            kv_data_type=DataType.FLOAT32,
            block_size=BLOCK_SIZE,
            # Fewer sequences than positions whose logits are asked for.
            limits=Limits(2, MAX_LENGTH, MAX_LENGTH, MAX_LENGTH),
            thread_count=2,
            progress=lambda line: None,
            peers=peers,
            adapter_limits=self._adapter_limits,
        )
        self.adapters = kind.adapters(config) if self._adapter_limits.slot_count else None
        config = replace(config, adapters=self.adapters)
        groups = layer_groups(config.share, DataType.FLOAT32)
        cache = KVCache(groups, self.block_count + 1, BLOCK_SIZE, device)
        unwritten = math.nan if kind.attention_backend is None else 0.0
        for layer in cache.layers:
            layer.keys.fill_(unwritten)
            layer.values.fill_(unwritten)
        assert kind.probe(config) is None
        loader = WeightLoader(checkpoint, config.share, torch.float32, device)
        self.executor = kind.load(config, loader, cache)
        loader.finish()

    def run(
        self, tokens: list[int], start: int, wanted: list[int], adapter_slot: int = 0
    ) -> torch.Tensor:
        """float32 [wanted, vocabulary] of one step of `tokens` from position `start` on."""
        count = len(tokens)
        positions = np.arange(start, start + count, dtype=np.int32)
        with torch.inference_mode():
            return self.executor.run(
                StepBatch(
                    query_starts=np.array([0, count], dtype=np.int32),
                    context_lengths=np.array([start + count], dtype=np.int32),
                    token_ids=np.array(tokens, dtype=np.int32),
                    positions=positions,
                    slots=positions + np.int32(BLOCK_SIZE),
                    block_tables=np.arange(1, self.block_count + 1, dtype=np.int32)[None],
                    adapter_slots=np.array([adapter_slot], np.int32) if adapter_slot else None,
                ),
                np.array(wanted, dtype=np.int32),
            ).clone()

    def logits(self, tokens: list[int], chunks: list[int]) -> torch.Tensor:
        """float32 [tokens, vocabulary], computed in the given chunks."""
        parts, start = [], 0
        for chunk in chunks:
            parts.append(self.run(tokens[start : start + chunk], start, list(range(chunk))))
            start += chunk
        assert start == len(tokens)
        return torch.cat(parts)

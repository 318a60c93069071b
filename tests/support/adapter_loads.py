"""Simulated workers with adapter slots, and what loads adapters into them over gRPC."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tests.support.simulated_tokens import expected_tokens
from tests.support.worker_rig import (
    MODEL,
    PROMPT,
    VOCABULARY,
    Rig,
    added,
    serving,
    simulated_runner,
)
from twinplane.worker.v1 import adapters_pb2, info_pb2, weights_pb2
from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.sampling import SamplingParameters

SLOTS = 3
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
CONFIG = json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
Requests = list[adapters_pb2.LoadAdapterRequest]


@asynccontextmanager
async def worker(slots: int = SLOTS, root: Path | None = None) -> AsyncIterator[Rig]:
    """A claimed worker with slots for adapters up to rank 4."""
    limits = AdapterLimits(slots, 4)
    async with serving(
        build=lambda: simulated_runner(replace(MODEL, adapter_limits=limits)), weights_root=root
    ) as rig:
        await rig.attach()
        yield rig


def tensor(end: str, seed: int, *shape: int) -> tuple[weights_pb2.TensorDescription, bytes]:
    data = np.random.default_rng(seed).standard_normal(shape).astype("<f4").tobytes()
    described = weights_pb2.TensorDescription(
        name=f"{PREFIX}{end}.weight", data_type=info_pb2.DATA_TYPE_FLOAT32, shape=shape
    )
    return described, data


def chunk(index: int, offset: int, data: bytes) -> adapters_pb2.LoadAdapterRequest:
    return adapters_pb2.LoadAdapterRequest(
        chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data)
    )


def streamed(seed: int, slot: int = 1, epoch: int = 1, **update: Any) -> Requests:
    """A whole load, its tensors in chunks of uneven lengths."""
    tensors = [tensor("A", seed, 2, 8), tensor("B", seed + 1, 6, 2)]
    header = adapters_pb2.AdapterUpdate(
        epoch=epoch,
        slot=slot,
        stream=adapters_pb2.StreamedAdapter(
            config_json=CONFIG, tensors=[described for described, _ in tensors]
        ),
        **update,
    )
    requests = [adapters_pb2.LoadAdapterRequest(update=header)]
    for index, (_, data) in enumerate(tensors):
        cuts = [0, 5, 24, len(data)]
        requests += [
            chunk(index, start, data[start:end]) for start, end in itertools.pairwise(cuts)
        ]
    return requests


async def load(rig: Rig, requests: Iterable[adapters_pb2.LoadAdapterRequest]) -> str:
    """Loads, and returns the digest."""
    response = await rig.stub.LoadAdapter(iter(list(requests)))
    return str(response.adapter.digest)


async def held(rig: Rig) -> dict[int, str]:
    """Digests by slot."""
    response = await rig.stub.ListAdapters(adapters_pb2.ListAdaptersRequest())
    return {each.slot: each.adapter.digest for each in response.adapters}


def unload(slot: int, epoch: int = 1) -> adapters_pb2.UnloadAdapterRequest:
    return adapters_pb2.UnloadAdapterRequest(epoch=epoch, slot=slot)


def adapted(row: int, block: int, slot: int, digest: str) -> Any:
    sequence = added(row, PROMPT, range(block, block + 10))
    sequence.adapter_slot, sequence.adapter_digest = slot, digest
    return sequence


def with_adapter(count: int, digest: str) -> list[int]:
    sampling = SamplingParameters(0.0, 0, 1.0, 0.0, 7)
    return expected_tokens(PROMPT, count, sampling, VOCABULARY, adapter_digest=digest)

"""A trainer's view of one worker: claim it, give it other weights, let it generate.

It speaks the worker's contract (protos/twinplane/worker/v1) itself, in place of a control plane.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import (
    info_pb2,
    model_runner_pb2,
    model_runner_pb2_grpc,
    step_pb2,
    weights_pb2,
)

Trained = Mapping[str, torch.Tensor]

CHUNK_BYTES = 1 << 20
_DATA_TYPES = {
    torch.float32: info_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: info_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: info_pb2.DATA_TYPE_FLOAT16,
    torch.float64: info_pb2.DATA_TYPE_FLOAT64,
}


class WorkerUpdates:
    """A claim on a worker. Its methods raise grpc.RpcError, with the reason, when it refuses."""

    def __init__(self, channel: grpc.Channel, controller_id: str) -> None:
        self.stub: Any = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        self._controller_id = controller_id
        self.epoch = int(time.time() * 1000)
        self.version: Any = None
        self.last_step = 0
        self.block_size = 0

    def attach(self) -> None:
        """Claims the worker: whoever had it is fenced."""
        answer = self.stub.Attach(
            model_runner_pb2.AttachRequest(
                epoch=self.epoch,
                controller_id=self._controller_id,
                contract_versions=info_pb2.ContractVersionRange(minimum=1, maximum=1),
            )
        )
        self.version = answer.worker_info.weight_version
        pool = self.stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest()).memory_pool
        self.block_size = pool.block_token_count

    def prepare(
        self, update_id: str, tensors: Trained, **source: Any
    ) -> weights_pb2.PreparedWeights:
        """Prepares all of the model's weights from `source`, a field of WeightsUpdate. `tensors`
        are streamed; empty for a source that is no stream."""
        update = weights_pb2.WeightsUpdate(
            epoch=self.epoch,
            update_id=update_id,
            target=weights_pb2.WEIGHTS_TARGET_MODEL,
            **source,
        )
        return self.stub.PrepareWeights(_messages(update, tensors)).prepared

    def commit(self, prepared: weights_pb2.PreparedWeights) -> weights_pb2.CommitWeightsResponse:
        """Makes them live."""
        answer = self.stub.CommitWeights(
            weights_pb2.CommitWeightsRequest(
                epoch=self.epoch, update_id=prepared.update_id, digest=prepared.digest
            )
        )
        self.version = answer.weight_version
        return answer


def described(tensors: Trained) -> list[weights_pb2.TensorDescription]:
    """The tensors without their numbers, in order."""
    return [
        weights_pb2.TensorDescription(
            name=name, data_type=_DATA_TYPES[tensor.dtype], shape=tensor.shape
        )
        for name, tensor in tensors.items()
    ]


def generate(
    worker: WorkerUpdates, prompt: Sequence[int], samples: int, tokens: int, seed: int = 1
) -> list[list[int]]:
    """Samples of so many tokens each, at temperature 1, from the worker's weights of now.

    All rows are in every step, and leave at the end. A real controller does far more: see
    docs/architecture.md.
    """
    blocks = -(-(len(prompt) + tokens) // worker.block_size)
    added = [
        step_pb2.AddedSequence(
            row=row,
            token_ids=prompt,
            prompt_token_count=len(prompt),
            output=step_pb2.OUTPUT_KIND_SAMPLE,
            sampling=types_pb2.SamplingParameters(
                temperature=1.0, top_p=1.0, seed=seed * samples + row
            ),
            block_ids=range(1 + row * blocks, 1 + (row + 1) * blocks),
        )
        for row in range(samples)
    ]
    rows = list(range(samples))
    first = step_pb2.ScheduledRows(
        rows=rows, start_positions=[0] * samples, token_counts=[len(prompt)] * samples
    )
    found = [_step(worker, added=added, scheduled=first)]
    for position in range(len(prompt), len(prompt) + tokens - 1):
        following = step_pb2.ScheduledRows(
            rows=rows, start_positions=[position] * samples, source_step_distances=[1] * samples
        )
        found.append(_step(worker, scheduled=following))
    _step(worker, removed_rows=rows)
    return [list(each) for each in zip(*found, strict=True)]


def _step(worker: WorkerUpdates, **plan: Any) -> Sequence[int]:
    """Runs a step; returns a token for each row in it."""
    worker.last_step += 1
    request = model_runner_pb2.ForwardRequest(
        plan=step_pb2.StepPlan(
            epoch=worker.epoch, step_id=worker.last_step, weight_version=worker.version, **plan
        )
    )
    return worker.stub.Forward(request).result.tokens


def _messages(
    update: weights_pb2.WeightsUpdate, tensors: Trained
) -> Iterator[weights_pb2.PrepareWeightsRequest]:
    yield weights_pb2.PrepareWeightsRequest(update=update)
    for index, tensor in enumerate(tensors.values()):
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), CHUNK_BYTES):
            yield weights_pb2.PrepareWeightsRequest(
                chunk=weights_pb2.TensorChunk(
                    tensor_index=index,
                    offset=start,
                    data=data[start : start + CHUNK_BYTES].tobytes(),
                )
            )

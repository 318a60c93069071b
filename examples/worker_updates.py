"""A trainer's view of one worker: claim it, give it other weights, let it generate.

It speaks the worker's contract (protos/twinplane/worker/v1) itself, in place of a control plane.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import torch

from twinplane.worker.v1 import (
    info_pb2,
    model_runner_pb2,
    model_runner_pb2_grpc,
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

"""Updates of a worker's weights in tests: messages, streams of tensors, and runners that swap."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.support import runner_rig, tiny_llama
from twinplane.worker.v1 import info_pb2, weights_pb2
from worker_service.domain.plan import WeightVersion
from worker_service.domain.weights import (
    DiskSource,
    StreamSource,
    TensorChunk,
    TensorDescription,
    WeightsUpdate,
)
from worker_service.runner.interface import Prepared, Updatable
from worker_service.runner.model_runner import ModelRunner
from worker_service.weights.sources.interface import FORMATS, bytes_of

MODEL = weights_pb2.WEIGHTS_TARGET_MODEL
BESIDE = weights_pb2.WEIGHTS_PLACEMENT_BESIDE
IN_PLACE = weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE
_DATA_TYPES = {
    torch.float32: info_pb2.DATA_TYPE_FLOAT32,
    torch.bfloat16: info_pb2.DATA_TYPE_BFLOAT16,
    torch.float16: info_pb2.DATA_TYPE_FLOAT16,
    torch.float64: info_pb2.DATA_TYPE_FLOAT64,
}

Tensors = Mapping[str, torch.Tensor]


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Those of a folder with one weight file."""
    return load_file(folder / "model.safetensors")


def described(tensors: Tensors) -> tuple[TensorDescription, ...]:
    """The tensors as the worker's domain describes them, with digests."""
    return tuple(
        TensorDescription(name, FORMATS[tensor.dtype], tuple(tensor.shape), _sha256(tensor))
        for name, tensor in tensors.items()
    )


def chunks(tensors: Tensors, size: int = 1 << 20) -> Iterator[TensorChunk]:
    """The tensors' bytes in order."""
    for index, tensor in enumerate(tensors.values()):
        data = bytes_of(tensor).tobytes()
        for start in range(0, len(data), size):
            yield TensorChunk(index, start, data[start : start + size])


def streamed(tensors: Tensors, **changes: Any) -> WeightsUpdate:
    """An update from a stream."""
    return WeightsUpdate("u", StreamSource(described(tensors)), **changes)


def from_disk(path: Path | str, **changes: Any) -> WeightsUpdate:
    """An update from files."""
    return WeightsUpdate("u", DiskSource(str(path)), **changes)


def prepare(runner: Updatable, update: WeightsUpdate, tensors: Tensors | None = None) -> Prepared:
    """Prepares it, as the thread that prepares weights would."""
    preparation = runner.begin_update(update, lambda: False)
    try:
        for chunk in chunks(tensors or {}, 1000):
            preparation.put(chunk)
        return preparation.finish()
    except BaseException:
        preparation.close()
        raise


def swap(runner: Updatable, update: WeightsUpdate, tensors: Tensors | None = None) -> WeightVersion:
    """Prepares and commits it."""
    prepared = prepare(runner, update, tensors)
    version = runner.commit_update(prepared)
    prepared.drop()
    return version


def update_message(update_id: str = "u", epoch: int = 1, **fields: Any) -> Any:
    """The first message of a stream."""
    fields.setdefault("target", MODEL)
    return weights_pb2.PrepareWeightsRequest(
        update=weights_pb2.WeightsUpdate(epoch=epoch, update_id=update_id, **fields)
    )


def stream_messages(
    tensors: Tensors, size: int = 1 << 20, update_id: str = "u", **fields: Any
) -> list[Any]:
    """A whole stream, the update first."""
    source = weights_pb2.StreamSource(tensors=descriptions(tensors))
    parts = [
        weights_pb2.PrepareWeightsRequest(
            chunk=weights_pb2.TensorChunk(
                tensor_index=each.tensor_index, offset=each.offset, data=each.data
            )
        )
        for each in chunks(tensors, size)
    ]
    return [update_message(update_id, stream=source, **fields), *parts]


def descriptions(tensors: Tensors) -> list[weights_pb2.TensorDescription]:
    """The tensors as the contract describes them, with digests."""
    return [
        weights_pb2.TensorDescription(
            name=name, data_type=_DATA_TYPES[each.dtype], shape=each.shape, sha256=_sha256(each)
        )
        for name, each in tensors.items()
    ]


def build(folder: Path, **changes: Any) -> ModelRunner:
    """A runner on one thread: several on a busy machine wait for each other."""
    return runner_rig.build(folder, **{"thread_count": 1, **changes})


def two_models(
    root: Path, family: str = "llama", names: Sequence[str] = ("old", "new"), **changes: Any
) -> list[Path]:
    """Folders of models alike but for their numbers."""
    folders = []
    for index, name in enumerate(names):
        model = getattr(tiny_llama, family)(**changes)
        generator = torch.Generator().manual_seed(100 + index)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * (index + 1) * noise)
        folders.append(tiny_llama.save(model, root / name))
    return folders


def _sha256(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(bytes_of(tensor).data).digest()

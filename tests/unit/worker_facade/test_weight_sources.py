"""Messages about broadcasts and shared memory that are wrong in themselves name their field."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
import torch
from google.protobuf import duration_pb2

from tests.support.weight_updates import descriptions, update_message
from tests.support.worker_rig import refusal, serving
from twinplane.worker.v1 import weights_pb2
from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import DistributedSource, IpcSource, PosixMemory
from worker_service.rpc.weights import update_from_pb

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
GLOO = weights_pb2.GROUP_BACKEND_GLOO


def group(**changes: Any) -> Any:
    """A message that is right, but for the changes."""
    fields: dict[str, Any] = {
        "address": "127.0.0.1:29500",
        "world_size": 2,
        "rank": 1,
        "source_rank": 0,
        "backend": GLOO,
        "key": "k",
        "tensors": descriptions(TENSORS),
    }
    source = weights_pb2.DistributedSource(**(fields | changes))
    return update_message(distributed=source)


def memory(**changes: Any) -> Any:
    """A message that is right, but for the changes."""
    shared = [
        weights_pb2.SharedTensor(tensor=each, offset=64 * index)
        for index, each in enumerate(descriptions(TENSORS))
    ]
    fields: dict[str, Any] = {
        "posix": weights_pb2.PosixSharedMemory(name="/x"),
        "byte_count": 1000,
        "tensors": shared,
    }
    if "cuda" in changes:
        del fields["posix"]
    return update_message(ipc=weights_pb2.IpcSource(**(fields | changes)))


def lasting(seconds: int, nanos: int = 0) -> duration_pb2.Duration:
    return duration_pb2.Duration(seconds=seconds, nanos=nanos)


ADDRESSES = ["", ":", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:1e3", "h:٣"]
ADDRESSES += ["host:99999999999", "host: 80", "host:+80", "host:0x50"]
KEYS = ["", "x" * 129, "a b", "a/b", "ä", "a\n", "\0", "a,b"]
NAMES = [
    "",
    "x",
    "/",
    "//",
    "/a/b",
    "/../x",
    "/a/",
    "/.",
    "/..",
    "/" + "x" * 255,
    "/a b",
    "/ä",
    "/a\0",
]
GROUPS: list[tuple[Any, str]] = [
    *((group(address=each), "address") for each in ADDRESSES),
    *((group(key=each), "key") for each in KEYS),
    *((group(world_size=each), "world_size") for each in (0, 1, 4097, 2**32 - 1)),
    *((group(rank=each), "rank") for each in (2, 3, 2**32 - 1)),
    *((group(source_rank=each), "source_rank") for each in (1, 2, 2**32 - 1)),
    *((group(backend=each), "backend") for each in (0, 3, 99)),
    *(
        (group(timeout=each), "timeout")
        for each in (lasting(0), lasting(-1), lasting(3601), lasting(3600, 1), lasting(2**60))
    ),
    (group(tensors=[]), "tensors"),
    (group(tensors=[weights_pb2.TensorDescription(name="a")]), "tensors[0].data_type"),
]
MEMORIES: list[tuple[Any, str]] = [
    *((memory(posix=weights_pb2.PosixSharedMemory(name=each)), "posix.name") for each in NAMES),
    *(
        (memory(cuda=weights_pb2.CudaIpcMemory(handle=bytes(size))), "cuda.handle")
        for size in (0, 1, 63, 65, 128)
    ),
    (memory(tensors=[]), "tensors"),
    (memory(tensors=[weights_pb2.SharedTensor()]), "tensors[0].tensor.data_type"),
    (update_message(ipc=weights_pb2.IpcSource(tensors=[weights_pb2.SharedTensor()])), "memory"),
]


@pytest.mark.parametrize("index", range(len(GROUPS)))
def test_the_field_of_a_group_is_named(index: int) -> None:
    message, field = GROUPS[index]
    with pytest.raises(UpdateInvalid) as raised:
        update_from_pb(message.update)
    assert raised.value.field_path == f"update.distributed.{field}"


@pytest.mark.parametrize("index", range(len(MEMORIES)))
def test_the_field_of_memory_is_named(index: int) -> None:
    message, field = MEMORIES[index]
    with pytest.raises(UpdateInvalid) as raised:
        update_from_pb(message.update)
    assert raised.value.field_path == f"update.ipc.{field}"


def test_what_is_right_is_taken() -> None:
    source = update_from_pb(group(address="[::1]:80", timeout=lasting(3600)).update).source
    assert isinstance(source, DistributedSource)
    assert (source.host, source.port, source.timeout_seconds) == ("::1", 80, 3600)
    source = update_from_pb(group(bucket_bytes=2**63).update).source
    assert isinstance(source, DistributedSource)
    assert (source.timeout_seconds, source.bucket_bytes) == (60, 2**63)
    assert [each.name for each in source.tensors] == ["a", "b"]
    shared = update_from_pb(memory().update).source
    assert isinstance(shared, IpcSource)
    assert (shared.memory, shared.offsets) == (PosixMemory("/x"), (0, 64))


@pytest.mark.parametrize(
    ("message", "field"), [(group(), "update.distributed"), (memory(), "update.ipc")]
)
async def test_a_simulated_worker_says_what_it_does_not_do(message: Any, field: str) -> None:
    async with serving() as rig:
        await rig.attach()
        refused = await refusal(rig.stub.PrepareWeights(iter([message])))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.reason, refused.field) == ("INVALID_UPDATE", field)
        assert rig.facade.updates.prepared is None

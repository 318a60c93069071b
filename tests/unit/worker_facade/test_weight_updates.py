"""Other weights over gRPC: prepared beside the steps, committed between two, fenced and idempotent.

The worker is simulated: its tokens say which weights made them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import torch
from safetensors.torch import save_file

from tests.support.weight_updates import stream_messages, update_message
from tests.support.worker_rig import (
    MODEL as SIMULATED,
)
from tests.support.worker_rig import (
    NO_LATENCY,
    Rig,
    first,
    following,
    refusal,
    serving,
    wanted,
)
from twinplane.worker.v1 import weights_pb2
from worker_service.simulated.runner import SimulatedRunner
from worker_service.simulated.weights import salt_of

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
FAILED = grpc.StatusCode.FAILED_PRECONDITION


def model(root: Path | None) -> Any:
    return replace(SIMULATED, weights_root=root)


async def prepare(rig: Rig, messages: list[Any] | None = None) -> weights_pb2.PreparedWeights:
    call = rig.stub.PrepareWeights(iter(stream_messages(TENSORS) if messages is None else messages))
    return (await call).prepared


def commit(rig: Rig, digest: str, epoch: int = 1, update_id: str = "u") -> Any:
    return rig.stub.CommitWeights(
        weights_pb2.CommitWeightsRequest(epoch=epoch, update_id=update_id, digest=digest)
    )


def abort(rig: Rig, epoch: int = 1, update_id: str = "u") -> Any:
    return rig.stub.AbortWeights(weights_pb2.AbortWeightsRequest(epoch=epoch, update_id=update_id))


async def test_an_update_from_a_stream_makes_other_tokens() -> None:
    async with serving() as rig:
        await rig.attach()
        prepared = await prepare(rig)
        info = (await rig.stub.GetWorkerInfo(weights_pb2.ListTensorsRequest())).worker_info
        assert (info.prepared_update.update_id, info.prepared_update.digest) == (
            "u",
            prepared.digest,
        )
        assert list((await rig.stub.Forward(first())).result.tokens) == wanted(1)
        committed = await commit(rig, prepared.digest)
        assert committed.weight_version.generation == 2
        assert committed.weight_version.digest == prepared.digest
        refused = await refusal(rig.stub.Forward(following(2)))
        assert (refused.code, refused.reason) == (FAILED, "WEIGHT_VERSION_MISMATCH")
        await rig.attach(2)
        result = await rig.stub.Forward(first(epoch=2, digest=prepared.digest, generation=2))
        assert list(result.result.tokens) == wanted(1, salt=salt_of(prepared.digest)) != wanted(1)
        listed = await rig.stub.ListTensors(weights_pb2.ListTensorsRequest())
        assert [each.name for each in listed.tensors] == ["a", "b"]
        assert listed.weight_version == committed.weight_version
        info = (await rig.stub.GetWorkerInfo(weights_pb2.ListTensorsRequest())).worker_info
        assert not info.HasField("prepared_update")


async def test_a_commit_may_be_sent_again() -> None:
    async with serving() as rig:
        await rig.attach()
        digest = (await prepare(rig)).digest
        one, two = await asyncio.gather(commit(rig, digest), commit(rig, digest))
        await rig.attach(2)
        three = await commit(rig, digest, epoch=2)
        assert one == two == three
        assert one.weight_version.generation == 2


async def test_the_same_tensors_from_disk_and_from_a_stream_have_one_digest(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors")
    runner = SimulatedRunner(model(tmp_path), NO_LATENCY)
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        digest = (await prepare(rig)).digest
        await abort(rig)
        disk = update_message(disk=weights_pb2.DiskSource(path="new"))
        assert (await prepare(rig, [disk])).digest == digest

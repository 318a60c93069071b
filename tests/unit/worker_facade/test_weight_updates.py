"""Other weights over gRPC: prepared beside the steps, committed between two, fenced and idempotent.

The worker is simulated: its tokens say which weights made them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file

from tests.support.weight_updates import stream_messages, update_message
from tests.support.worker_rig import (
    MODEL as SIMULATED,
)
from tests.support.worker_rig import (
    NO_LATENCY,
    PATIENCE,
    Device,
    Rig,
    first,
    following,
    refusal,
    serving,
    simulated_runner,
    until,
    wanted,
)
from twinplane.worker.v1 import weights_pb2
from worker_service.domain.weights import WeightsUpdate
from worker_service.runner.interface import PreparationCancelled
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


class Prepares(SimulatedRunner):
    """Waits in the middle of preparing until it is let go on, or cancelled."""

    def __init__(self, root: Path | None = None) -> None:
        super().__init__(model(root), NO_LATENCY, sleep=lambda seconds: None)
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def begin_update(self, update: WeightsUpdate, is_cancelled: Callable[[], bool]) -> Any:
        preparation = super().begin_update(update, is_cancelled)
        finish = preparation.finish

        def wait() -> Any:
            self.entered.set()
            while not self.go_on.wait(0.01):
                if is_cancelled():
                    raise PreparationCancelled
            return finish()

        preparation.finish = wait
        return preparation


def begun(rig: Rig) -> asyncio.Task[Any]:
    return asyncio.create_task(prepare(rig))


async def has_entered(runner: Prepares) -> None:
    assert await asyncio.to_thread(runner.entered.wait, PATIENCE)


def is_free(runner: Prepares, rig: Rig) -> bool:
    return runner._weights.prepared is None and rig.facade.updates.prepared is None


async def test_steps_go_on_while_an_update_is_prepared() -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        preparing = begun(rig)
        await has_entered(runner)
        tokens = [*(await rig.stub.Forward(first())).result.tokens]
        for step in range(2, 6):
            tokens += (await rig.stub.Forward(following(step))).result.tokens
        assert tokens == wanted(5)
        assert not preparing.done()
        runner.go_on.set()
        assert (await preparing).update_id == "u"


async def test_one_update_at_a_time() -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        preparing = begun(rig)
        await has_entered(runner)
        for update_id in ("u", "v"):
            messages = stream_messages(TENSORS, update_id=update_id)
            refused = await refusal(prepare(rig, messages))
            assert (refused.code, refused.reason) == (FAILED, "UPDATE_CONFLICT")
            assert refused.metadata["update_id"] == "u"
            assert "is being prepared" in refused.message
        runner.go_on.set()
        digest = (await preparing).digest
        refused = await refusal(prepare(rig, stream_messages(TENSORS, update_id="v")))
        assert refused.reason == "UPDATE_CONFLICT" and "waits for its commit" in refused.message
        for update_id, wrong in (("v", digest), ("u", "0" * 64), ("u", "")):
            refused = await refusal(commit(rig, wrong, update_id=update_id))
            assert (refused.code, refused.reason) == (FAILED, "UPDATE_CONFLICT")
            assert refused.metadata["update_id"] == "u"
        assert (await commit(rig, digest)).weight_version.generation == 2


@pytest.mark.parametrize("when", ["while it is prepared", "while it waits"])
async def test_an_update_that_is_aborted_is_gone(when: str) -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        await abort(rig)  # nothing is there, which is no error
        preparing = begun(rig)
        await has_entered(runner)
        await abort(rig, update_id="another")
        if when == "while it waits":
            runner.go_on.set()
            digest = (await preparing).digest
            await abort(rig)
            refused = await refusal(commit(rig, digest))
        else:
            await abort(rig)
            refused = await refusal(preparing)
        assert refused.reason == "UPDATE_CONFLICT"
        assert is_free(runner, rig)
        await abort(rig)
        runner.go_on.set()
        assert (await prepare(rig)).update_id == "u"


async def test_a_sender_that_leaves_ends_its_preparation() -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        call = rig.stub.PrepareWeights(iter(stream_messages(TENSORS)))
        await has_entered(runner)
        call.cancel()
        await until(lambda: rig.facade.updates._preparing is None)
        assert is_free(runner, rig)
        runner.go_on.set()
        assert (await prepare(rig)).update_id == "u"


async def test_a_sender_that_leaves_in_the_middle_of_its_stream() -> None:
    """After each of its messages."""
    messages = stream_messages(TENSORS, size=5)
    runner = simulated_runner()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        for count in range(len(messages)):
            call = rig.stub.PrepareWeights()
            for message in messages[:count]:
                await call.write(message)
            if count:
                await until(lambda: rig.facade.updates._preparing is not None)
            call.cancel()
            await until(lambda: rig.facade.updates._preparing is None)
            assert rig.facade.updates.prepared is None
        assert (await prepare(rig)).update_id == "u"


async def test_a_new_claim_fences_what_is_being_prepared_and_keeps_what_waits() -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        preparing = begun(rig)
        await has_entered(runner)
        await rig.attach(2)
        refused = await refusal(preparing)
        assert (refused.code, refused.reason) == (FAILED, "STALE_EPOCH")
        assert is_free(runner, rig)
        runner.go_on.set()
        digest = (await prepare(rig, stream_messages(TENSORS, epoch=2))).digest
        info = (await rig.attach(3)).worker_info
        assert info.prepared_update.digest == digest
        for call in (
            prepare(rig, stream_messages(TENSORS, epoch=2)),
            commit(rig, digest, epoch=2),
            abort(rig, epoch=2),
            rig.stub.Sleep(weights_pb2.SleepRequest(epoch=2, tags=[BOTH[0]])),
            rig.stub.Wake(weights_pb2.WakeRequest(epoch=2, tags=[BOTH[0]])),
        ):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (FAILED, "STALE_EPOCH")
        assert (await commit(rig, digest, epoch=3)).weight_version.digest == digest


async def test_a_commit_waits_for_the_steps_before_it() -> None:
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        digest = (await prepare(rig)).digest
        step = rig.stub.Forward(first())
        await device.entered()
        call = commit(rig, digest)
        await until(lambda: rig.facade.updates._commit is not None)
        assert not call.done()
        device.open()
        assert list((await step).result.tokens) == wanted(1)
        assert (await call).weight_version.generation == 2


async def test_a_worker_that_drains_ends_what_is_prepared() -> None:
    runner = Prepares()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        preparing = begun(rig)
        await has_entered(runner)
        rig.facade.drain()
        refused = await refusal(preparing)
        assert refused.reason == "WORKER_DRAINING"
        assert is_free(runner, rig)


BOTH = [weights_pb2.SLEEP_TAG_WEIGHTS, weights_pb2.SLEEP_TAG_KV]


async def test_a_sleeping_worker_runs_no_step() -> None:
    async with serving() as rig:
        await rig.attach()
        digest = (await prepare(rig)).digest
        slept = await rig.stub.Sleep(weights_pb2.SleepRequest(epoch=1, tags=BOTH[:1]))
        assert list(slept.asleep) == BOTH[:1]
        slept = await rig.stub.Sleep(weights_pb2.SleepRequest(epoch=1, tags=BOTH))
        assert list(slept.asleep) == BOTH
        for call in (rig.stub.Forward(first()), commit(rig, digest)):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (FAILED, "ASLEEP")
        woken = await rig.stub.Wake(weights_pb2.WakeRequest(epoch=1, tags=BOTH[1:]))
        assert list(woken.asleep) == BOTH[:1]
        assert (await refusal(rig.stub.Forward(first()))).reason == "ASLEEP"
        woken = await rig.stub.Wake(weights_pb2.WakeRequest(epoch=1, tags=BOTH))
        assert not woken.asleep
        assert list((await rig.stub.Forward(first())).result.tokens) == wanted(1)
        refused = await refusal(rig.stub.Sleep(weights_pb2.SleepRequest(epoch=1, tags=BOTH)))
        assert (refused.code, refused.reason) == (FAILED, "PLAN_MISMATCH")
        assert (await commit(rig, digest)).weight_version.generation == 2

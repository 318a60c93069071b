"""Messages about weights that are wrong in themselves name their field; random calls keep order."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest
import torch

from tests.support.quick import spread
from tests.support.weight_updates import (
    descriptions,
    stream_messages,
    update_message,
)
from tests.support.worker_rig import Rig, first, refusal, serving, simulated_runner, until, wanted
from twinplane.worker.v1 import info_pb2, weights_pb2
from worker_service.lifecycle import LifecycleState
from worker_service.simulated.weights import salt_of
from worker_service.telemetry import WorkerTelemetry

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
GOOD = weights_pb2.StreamSource(tensors=descriptions(TENSORS))
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def stream_of(**changes: Any) -> weights_pb2.StreamSource:
    """GOOD, its second tensor changed."""
    source = weights_pb2.StreamSource()
    source.CopyFrom(GOOD)
    tensor = weights_pb2.TensorDescription(**changes)
    for name in changes:
        source.tensors[1].ClearField(name)
    source.tensors[1].MergeFrom(tensor)
    return source


UPDATES: dict[str, tuple[Any, str]] = {
    "no name": (update_message("", stream=GOOD), "update.update_id"),
    "a long name": (update_message("x" * 129, stream=GOOD), "update.update_id"),
    "a name with a space": (update_message("a b", stream=GOOD), "update.update_id"),
    "a name with a letter that is not ASCII": (
        update_message("ä", stream=GOOD),
        "update.update_id",
    ),
    "a name with a line end": (update_message("a\n", stream=GOOD), "update.update_id"),
    "no target": (
        update_message(stream=GOOD, target=weights_pb2.WEIGHTS_TARGET_UNSPECIFIED),
        "update.target",
    ),
    "a target of tomorrow": (update_message(stream=GOOD, target=99), "update.target"),
    "a draft model": (
        update_message(stream=GOOD, target=weights_pb2.WEIGHTS_TARGET_DRAFT),
        "update.target",
    ),
    "a placement of tomorrow": (update_message(stream=GOOD, placement=99), "update.placement"),
    "no source": (update_message(), "update.source"),
    "a short digest": (update_message(stream=GOOD, expected_digest="ab"), "update.expected_digest"),
    "a digest in capitals": (
        update_message(stream=GOOD, expected_digest="A" * 64),
        "update.expected_digest",
    ),
    "no tensors": (update_message(stream=weights_pb2.StreamSource()), "update.stream.tensors"),
    "no format": (
        update_message(stream=stream_of(data_type=info_pb2.DATA_TYPE_UNSPECIFIED)),
        "update.stream.tensors[1].data_type",
    ),
    "a format of tomorrow": (
        update_message(stream=stream_of(data_type=99)),
        "update.stream.tensors[1].data_type",
    ),
    "many dimensions": (
        update_message(stream=stream_of(shape=[1] * 9)),
        "update.stream.tensors[1].shape",
    ),
    "a short sha256": (
        update_message(stream=stream_of(sha256=b"x")),
        "update.stream.tensors[1].sha256",
    ),
    "no path": (update_message(disk=weights_pb2.DiskSource()), "update.disk.path"),
    "no root": (update_message(disk=weights_pb2.DiskSource(path="x")), "update.disk.path"),
    "a chunk first": (
        weights_pb2.PrepareWeightsRequest(chunk=weights_pb2.TensorChunk(data=b"x")),
        "update",
    ),
    "nothing": (weights_pb2.PrepareWeightsRequest(), "update"),
}


@pytest.mark.parametrize("name", UPDATES)
async def test_the_field_is_named(name: str) -> None:
    message, field = UPDATES[name]
    async with serving() as rig:
        await rig.attach()
        refused = await refusal(rig.stub.PrepareWeights(iter([message])))
        assert (refused.code, refused.reason, refused.field) == (INVALID, "INVALID_UPDATE", field)
        assert rig.facade.updates.prepared is None
        await takes_an_update(rig)


async def takes_an_update(rig: Rig) -> None:
    call = rig.stub.PrepareWeights(iter(stream_messages(TENSORS)))
    assert (await call).prepared.update_id == "u"


@pytest.mark.parametrize(
    "later", [update_message(stream=GOOD), weights_pb2.PrepareWeightsRequest()]
)
async def test_what_comes_behind_the_first_message_is_a_chunk(later: Any) -> None:
    async with serving() as rig:
        await rig.attach()
        messages = [stream_messages(TENSORS)[0], later]
        refused = await refusal(rig.stub.PrepareWeights(iter(messages)))
        assert (refused.code, refused.reason, refused.field) == (INVALID, "INVALID_UPDATE", "chunk")
        await takes_an_update(rig)


async def test_a_stream_that_ends_early_may_be_sent_again() -> None:
    messages = stream_messages(TENSORS, size=5)
    async with serving() as rig:
        await rig.attach()
        for count in range(len(messages)):
            refused = await refusal(rig.stub.PrepareWeights(iter(messages[:count])))
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert (refused.reason, refused.retry_after) == ("SOURCE_LOST", 1.0)
        await takes_an_update(rig)


@pytest.mark.parametrize("method", ["Sleep", "Wake"])
@pytest.mark.parametrize("tags", [[], [weights_pb2.SLEEP_TAG_UNSPECIFIED], [99]])
async def test_what_is_to_sleep_must_be_said(method: str, tags: list[Any]) -> None:
    async with serving() as rig:
        await rig.attach()
        request = getattr(weights_pb2, f"{method}Request")(epoch=1, tags=tags)
        refused = await refusal(getattr(rig.stub, method)(request))
        assert (refused.code, refused.reason, refused.field) == (INVALID, "INVALID_UPDATE", "tags")


async def test_updates_are_counted_by_how_they_end() -> None:
    telemetry = WorkerTelemetry("1", lambda: LifecycleState.ACTIVE)
    async with serving(metrics=telemetry, update_metrics=telemetry) as rig:
        await rig.attach()
        await refusal(rig.stub.PrepareWeights(iter(stream_messages(TENSORS)[:1])))
        await takes_an_update(rig)
        await rig.stub.AbortWeights(weights_pb2.AbortWeightsRequest(epoch=1, update_id="u"))
        await takes_an_update(rig)
        prepared = rig.facade.updates.prepared
        assert prepared is not None
        await rig.stub.CommitWeights(
            weights_pb2.CommitWeightsRequest(epoch=1, update_id="u", digest=prepared.digest)
        )
    text = telemetry.render().decode()
    for outcome, count in (("committed", 1), ("refused", 1), ("aborted", 1), ("failed", 0)):
        line = f'twinplane_worker_weight_updates_total{{outcome="{outcome}"}} {count}.0'
        assert line in text
    assert "twinplane_worker_weight_update_prepare_seconds_count 2.0" in text
    assert "twinplane_worker_weight_update_pause_seconds_count 1.0" in text


class Expected:
    """What a worker must be like after each call, kept beside it."""

    def __init__(self, first_digest: str) -> None:
        self.epoch = 1
        self.generation, self.digest = 1, first_digest
        self.salt = 0
        self.waiting: tuple[str, str] | None = None
        self.last: tuple[str, str, int] | None = None


@pytest.mark.parametrize("seed", spread(range(60), 15))
async def test_random_calls(seed: int) -> None:
    """Prepare, commit, abort, claims and steps in any order, some of them wrong."""
    rng = random.Random(seed)
    runner = simulated_runner()
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        expected = Expected(runner.capability().weight_version.digest)
        for _ in range(25):
            await one_call(rig, rng, expected)
        info = (await rig.stub.GetWorkerInfo(weights_pb2.ListTensorsRequest())).worker_info
        assert info.weight_version.generation == expected.generation
        assert info.weight_version.digest == expected.digest
        assert info.HasField("prepared_update") == (expected.waiting is not None)


async def one_call(rig: Rig, rng: random.Random, expected: Expected) -> None:
    name = rng.choice("uvw")
    epoch = expected.epoch - (rng.random() < 0.1)
    stale = epoch != expected.epoch
    match rng.choice(["prepare", "prepare", "commit", "commit", "abort", "claim", "step"]):
        case "prepare":
            tensors = {"t": torch.full((3,), float(rng.randrange(4)))}
            messages = stream_messages(tensors, 4, update_id=name, epoch=epoch)
            if stale or expected.waiting is not None:
                reason = "STALE_EPOCH" if stale else "UPDATE_CONFLICT"
                assert (await refusal(rig.stub.PrepareWeights(iter(messages)))).reason == reason
            elif rng.random() < 0.3:  # the sender leaves in the middle
                call = rig.stub.PrepareWeights()
                for message in messages[: rng.randrange(1, len(messages))]:
                    await call.write(message)
                await until(lambda: rig.facade.updates._preparing is not None)
                call.cancel()
                await until(lambda: rig.facade.updates._preparing is None)
            else:
                call = rig.stub.PrepareWeights(iter(messages))
                expected.waiting = (name, (await call).prepared.digest)
        case "commit":
            digest = expected.waiting[1] if expected.waiting and rng.random() < 0.8 else "0" * 64
            if expected.last and rng.random() < 0.3:
                name, digest = expected.last[:2]
            call = rig.stub.CommitWeights(
                weights_pb2.CommitWeightsRequest(epoch=epoch, update_id=name, digest=digest)
            )
            if not stale and expected.waiting == (name, digest):
                version = (await call).weight_version
                expected.generation += 1
                assert version.generation == expected.generation
                expected.digest, expected.salt = digest, salt_of(digest)
                expected.last, expected.waiting = (name, digest, expected.generation), None
            elif (
                not stale
                and expected.last
                and expected.last[:2] == (name, digest)
                and (expected.waiting is None or expected.waiting[0] != name)
            ):
                assert (await call).weight_version.generation == expected.last[2]
            else:
                reason = "STALE_EPOCH" if stale else "UPDATE_CONFLICT"
                assert (await refusal(call)).reason == reason
        case "abort":
            request = weights_pb2.AbortWeightsRequest(epoch=epoch, update_id=name)
            if stale:
                assert (await refusal(rig.stub.AbortWeights(request))).reason == "STALE_EPOCH"
            else:
                await rig.stub.AbortWeights(request)
                if expected.waiting and expected.waiting[0] == name:
                    expected.waiting = None
        case _:
            expected.epoch += 1
            await rig.attach(expected.epoch)
            plan = first(
                epoch=expected.epoch, digest=expected.digest, generation=expected.generation
            )
            result = (await rig.stub.Forward(plan)).result
            assert list(result.tokens) == wanted(1, salt=expected.salt)

"""Adapters over loopback gRPC: loaded, listed, used and unloaded while steps run, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.adapter_loads import (
    CONFIG,
    FAILED,
    INVALID,
    SLOTS,
    Requests,
    adapted,
    held,
    load,
    streamed,
    unload,
    with_adapter,
    worker,
)
from tests.support.worker_rig import (
    PROMPT,
    added,
    attach_request,
    first,
    following,
    forward,
    refusal,
    wanted,
)
from twinplane.worker.v1 import adapters_pb2, model_runner_pb2, weights_pb2


async def test_a_row_samples_with_its_adapter_and_its_neighbour_without() -> None:
    async with worker() as rig:
        digest = await load(rig, streamed(1))
        enter = forward(
            1,
            add=[added(0, PROMPT, range(1, 11)), adapted(1, 11, 1, digest)],
            rows=[0, 1],
            start_positions=[0, 0],
            token_counts=[len(PROMPT)] * 2,
        )
        plain, own = [], []
        for step in range(1, 9):
            request = (
                enter
                if step == 1
                else forward(
                    step,
                    rows=[0, 1],
                    start_positions=[len(PROMPT) + step - 2] * 2,
                    source_step_distances=[1, 1],
                )
            )
            tokens = (await rig.stub.Forward(request)).result.tokens
            plain.append(tokens[0])
            own.append(tokens[1])
        assert plain == wanted(8)
        assert own == with_adapter(8, digest) != plain


async def test_what_is_loaded_is_told_and_stays_over_claims() -> None:
    async with worker() as rig:
        info = (await rig.stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest())).worker_info
        assert (info.adapter_slot_count, info.max_adapter_rank) == (SLOTS, 4)
        one = await load(rig, streamed(1, slot=3))
        assert one == await load(rig, streamed(1, slot=1))  # the same content
        two = await load(rig, streamed(2, slot=2, expected_digest=""))
        assert one != two
        await rig.attach(2)
        assert await held(rig) == {1: one, 2: two, 3: one}
        assert await load(rig, streamed(2, slot=1, epoch=2, expected_digest=two)) == two
        await rig.stub.UnloadAdapter(unload(2, 2))
        await rig.stub.UnloadAdapter(unload(2, 2))  # an empty slot is no error
        assert await held(rig) == {1: two, 3: one}


async def test_a_slot_that_a_row_uses_is_neither_replaced_nor_emptied() -> None:
    async with worker() as rig:
        digest = await load(rig, streamed(1))
        enter = forward(
            1,
            add=[adapted(0, 1, 1, digest)],
            rows=[0],
            start_positions=[0],
            token_counts=[len(PROMPT)],
        )
        tokens = list((await rig.stub.Forward(enter)).result.tokens)
        for call in (load(rig, streamed(2)), rig.stub.UnloadAdapter(unload(1))):
            refused = await refusal(call)
            assert (refused.code, refused.reason) == (FAILED, "ADAPTER_IN_USE")
        await load(rig, streamed(2, slot=2))
        tokens += (await rig.stub.Forward(following(2))).result.tokens
        assert tokens == with_adapter(2, digest)
        await rig.stub.Forward(forward(3, remove=[0]))
        other = await load(rig, streamed(2))
        assert await held(rig) == {1: other, 2: other}


@pytest.mark.parametrize(("slot", "digest", "code", "reason", "field"), [
    (SLOTS + 1, "", INVALID, "INVALID_PLAN", "plan.added[0].adapter_slot"),
    (2**31, "", INVALID, "INVALID_PLAN", "plan.added[0].adapter_slot"),
    (0, "own", INVALID, "INVALID_PLAN", "plan.added[0].adapter_digest"),
    (1, "", FAILED, "PLAN_MISMATCH", ""),
    (1, "ab" * 32, FAILED, "PLAN_MISMATCH", ""),
    (2, "own", FAILED, "PLAN_MISMATCH", ""),
    (2, "", FAILED, "PLAN_MISMATCH", ""),
])  # fmt: skip
async def test_a_plan_for_another_adapter_is_refused(
    slot: int, digest: str, code: grpc.StatusCode, reason: str, field: str
) -> None:
    async with worker() as rig:
        own = await load(rig, streamed(1))
        sequence = adapted(0, 1, slot, own if digest == "own" else digest)
        refused = await refusal(rig.stub.Forward(forward(1, add=[sequence])))
        assert (refused.code, refused.reason, refused.field) == (code, reason, field)
        assert refused.metadata["rows"] == "0"
        assert list((await rig.stub.Forward(first())).result.tokens) == wanted(1)


def changed(index: int, change: Callable[[Any], object]) -> Callable[[Requests], Requests]:
    def apply(requests: Requests) -> Requests:
        copies = [type(each).FromString(each.SerializeToString()) for each in requests]
        change(copies[index])
        return copies

    return apply


def setting(path: str, value: Any) -> Callable[[Any], object]:
    """Sets a field of a message, by its dotted path."""

    def change(message: Any) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            message = getattr(message, owner)
        setattr(message, name, value)

    return change


def describing(name: str, value: Any) -> Callable[[Any], object]:
    """Sets a field of the first tensor's description."""
    return lambda message: setattr(message.update.stream.tensors[0], name, value)


# What is done to a sound load, and the field that the refusal names.
FAULTS: list[tuple[Callable[[Requests], Requests], str]] = [
    (lambda requests: [], "update"),
    (lambda requests: requests[1:], "update"),
    (lambda requests: [requests[0], requests[0]], "chunk"),
    (lambda requests: [requests[0], *requests[2:]], "chunk."),
    (lambda requests: [*requests[:2], requests[1]], "chunk."),
    (lambda requests: [*requests, requests[-1]], "chunk."),
    (lambda requests: [requests[0], *requests[4:]], "chunk."),
    (lambda requests: [requests[0], *reversed(requests[1:])], "chunk."),
    (lambda requests: [requests[0], adapters_pb2.LoadAdapterRequest()], "chunk"),
    (changed(1, setting("chunk.data", b"")), "chunk.data"),
    (changed(3, setting("chunk.data", b"x" * 1000)), "chunk.data"),
    (changed(1, setting("chunk.tensor_index", 1)), "chunk."),
    (changed(1, setting("chunk.offset", 1)), "chunk."),
    (changed(0, setting("update.slot", 0)), "update.slot"),
    (changed(0, setting("update.slot", SLOTS + 1)), "update.slot"),
    (changed(0, setting("update.slot", 2**32 - 1)), "update.slot"),
    (changed(0, setting("update.expected_digest", "ab" * 32)), "update.expected_digest"),
    (changed(0, lambda each: each.update.ClearField("stream")), "update.source"),
    (changed(0, setting("update.disk.path", "there")), "chunk"),
    (changed(0, setting("update.stream.config_json", "{")), "config_json"),
    (changed(0, setting("update.stream.config_json", CONFIG.replace("2,", "4,"))), ""),
    (changed(0, setting("update.stream.config_json", CONFIG.replace("2,", "5,"))), ""),
    (changed(0, describing("sha256", b"x" * 31)), "update.stream.tensors[0].sha256"),
    (changed(0, describing("sha256", b"x" * 32)), ""),
    (changed(0, describing("data_type", 0)), "update.stream.tensors[0].data_type"),
    (changed(0, describing("data_type", 99)), "update.stream.tensors[0].data_type"),
    (changed(0, describing("name", "other")), ""),
    (changed(0, lambda each: each.update.stream.tensors[0].shape.append(1)), ""),
    (changed(0, lambda each: each.update.stream.tensors[0].shape.extend([1] * 9)),
     "update.stream.tensors[0].shape"),
    (changed(0, lambda each: each.update.stream.tensors[0].shape.append(2**63)), ""),
    (changed(0, lambda each: each.update.stream.tensors.append(
        each.update.stream.tensors[0])), ""),
    (changed(0, lambda each: each.update.stream.ClearField("tensors")), ""),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "field"), FAULTS, ids=range(len(FAULTS)))
async def test_a_load_that_does_not_fit_is_refused_and_changes_nothing(
    fault: Callable[[Requests], Requests], field: str
) -> None:
    async with worker() as rig:
        digest = await load(rig, streamed(7, slot=2))
        requests = fault(streamed(1))
        refused = await refusal(load(rig, requests))
        if not requests[1:] and requests and "tensors" not in str(requests[0]):
            assert refused.reason in ("INVALID_UPDATE", "SOURCE_LOST")
        else:
            assert (refused.code, refused.reason) == (INVALID, "INVALID_UPDATE")
        assert refused.field and refused.field.startswith(field)
        assert await held(rig) == {2: digest}
        assert await load(rig, streamed(1)) == (await held(rig))[1]


@pytest.mark.parametrize("count", range(1, 7))
async def test_a_stream_that_ends_early_changes_nothing(count: int) -> None:
    async with worker() as rig:
        refused = await refusal(load(rig, streamed(1)[:count]))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SOURCE_LOST")
        assert refused.retry_after is not None
        assert await held(rig) == {}


async def test_numbers_that_are_not_finite_are_refused() -> None:
    async with worker() as rig:
        requests = streamed(1)
        poison = np.array([np.nan], dtype="<f4").tobytes()
        requests[1].chunk.data = poison + requests[1].chunk.data[4:]
        refused = await refusal(load(rig, requests))
        assert refused.reason == "INVALID_UPDATE" and "not finite" in refused.message
        assert await held(rig) == {}


async def test_a_worker_without_slots_says_so() -> None:
    async with worker(slots=0) as rig:
        refused = await refusal(load(rig, streamed(1)))
        assert refused.field == "update.slot" and "--max-loras" in refused.message
        assert await held(rig) == {}
        sequence = adapted(0, 1, 1, "ab" * 32)
        refused = await refusal(rig.stub.Forward(forward(1, add=[sequence])))
        assert refused.field == "plan.added[0].adapter_slot"


async def test_nothing_is_read_from_disk_unless_the_operator_says_where(tmp_path: Path) -> None:
    async with worker() as rig:
        update = adapters_pb2.AdapterUpdate(
            epoch=1, slot=1, disk=weights_pb2.DiskSource(path=str(tmp_path))
        )
        refused = await refusal(load(rig, [adapters_pb2.LoadAdapterRequest(update=update)]))
        assert refused.field == "update.disk.path" and "--weights-root" in refused.message


async def test_a_folder_and_a_stream_of_the_same_adapter_have_one_digest(tmp_path: Path) -> None:
    requests = streamed(1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "adapter_config.json").write_text(CONFIG)
    tensors = {}
    for index, described in enumerate(requests[0].update.stream.tensors):
        chunks = [each.chunk.data for each in requests if each.chunk.tensor_index == index]
        data = b"".join(chunks[1:] if index == 0 else chunks)  # the first message has no chunk
        tensors[described.name] = np.frombuffer(data, "<f4").reshape(described.shape)
    save_file(tensors, tmp_path / "mine" / "adapter_model.safetensors")
    async with worker(root=tmp_path) as rig:
        update = adapters_pb2.AdapterUpdate(
            epoch=1, slot=2, disk=weights_pb2.DiskSource(path="mine")
        )
        digest = await load(rig, [adapters_pb2.LoadAdapterRequest(update=update)])
        assert digest == await load(rig, requests)
        assert await held(rig) == {1: digest, 2: digest}


async def test_a_claim_fences_the_loads_of_the_one_before() -> None:
    async with worker() as rig:
        requests = streamed(1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> AsyncIterator[adapters_pb2.LoadAdapterRequest]:
            for index, request in enumerate(requests):
                if index == 3:
                    begun.set()
                    await go_on.wait()
                yield request

        call = rig.stub.LoadAdapter(slowly())
        await begun.wait()
        await rig.stub.Attach(attach_request(2))
        go_on.set()
        refused = await refusal(call)
        assert (refused.code, refused.reason) == (FAILED, "STALE_EPOCH")
        assert await held(rig) == {}
        for stale in (load(rig, streamed(1)), rig.stub.UnloadAdapter(unload(1))):
            assert (await refusal(stale)).reason == "STALE_EPOCH"
        await load(rig, streamed(1, epoch=2))


async def test_a_caller_that_leaves_holds_up_nobody() -> None:
    async with worker() as rig:
        begun = asyncio.Event()

        async def never() -> AsyncIterator[adapters_pb2.LoadAdapterRequest]:
            for request in streamed(1)[:3]:
                yield request
            begun.set()
            await asyncio.Event().wait()

        for _ in range(20):
            begun.clear()
            call = rig.stub.LoadAdapter(never())
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        await load(rig, streamed(1))
        assert list(await held(rig)) == [1]


async def test_churn_beside_running_rows_changes_none_of_their_tokens() -> None:
    """Slots 2 and 3 are loaded, replaced and emptied while a row without an adapter goes on, and
    one with that of slot 1."""
    steps = 30
    async with worker() as rig:
        digest = await load(rig, streamed(1))
        pool = await rig.stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest())
        over = asyncio.Event()
        churns = 0

        async def churn() -> None:
            nonlocal churns
            random = np.random.default_rng(5)
            while not over.is_set() or churns < 50:
                slot, seed = int(random.integers(2, SLOTS + 1)), int(random.integers(2, 90))
                if random.integers(3):
                    await load(rig, streamed(seed, slot=slot))
                else:
                    await rig.stub.UnloadAdapter(unload(slot))
                churns += 1

        task = asyncio.create_task(churn())
        plain, own = [], []
        for step in range(1, steps + 1):
            request = (
                forward(
                    1,
                    add=[added(0, PROMPT, range(1, 11)), adapted(1, 11, 1, digest)],
                    rows=[0, 1],
                    start_positions=[0, 0],
                    token_counts=[len(PROMPT)] * 2,
                )
                if step == 1
                else forward(
                    step,
                    rows=[0, 1],
                    start_positions=[len(PROMPT) + step - 2] * 2,
                    source_step_distances=[1, 1],
                )
            )
            tokens = (await rig.stub.Forward(request)).result.tokens
            plain.append(tokens[0])
            own.append(tokens[1])
        over.set()
        await task
        assert plain == wanted(steps) and own == with_adapter(steps, digest)
        await rig.stub.Forward(forward(steps + 1, remove=[0, 1]))
        for slot in range(1, SLOTS + 1):
            await rig.stub.UnloadAdapter(unload(slot))
        assert await held(rig) == {}
        after = await rig.stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest())
        assert after.memory_pool == pool.memory_pool

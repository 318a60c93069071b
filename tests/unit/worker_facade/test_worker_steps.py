"""Unary steps over loopback gRPC: claims, order, idempotency, held sampling."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import numpy as np
import pytest

from tests.support.worker_rig import (
    HOLD,
    NONE,
    PROMPT,
    SAMPLE,
    VOCABULARY,
    Device,
    added,
    attach_request,
    first,
    following,
    forward,
    refusal,
    serving,
    wanted,
)
from twinplane.worker.v1 import model_runner_pb2, step_pb2
from worker_service.domain.plan import RowFault, RowFaultKind, StepPlan

FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


def sample(
    step_id: int,
    *,
    epoch: int = 1,
    rows: Sequence[int] = (0,),
    masks: dict[int, list[int]] | None = None,
):
    """Samples held rows of a step; `masks` are the allowed tokens by row."""
    words = -(-VOCABULARY // 32)
    bitmasks = np.zeros((len(masks or {}), words), dtype="<u4")
    for index, tokens in enumerate((masks or {}).values()):
        for token in tokens:
            bitmasks[index, token // 32] |= np.uint32(1 << (token % 32))
    return model_runner_pb2.SampleRequest(
        epoch=epoch,
        step_id=step_id,
        rows=rows,
        grammar_masks=step_pb2.GrammarMasks(rows=masks or {}, bitmasks=bitmasks.tobytes()),
    )


async def test_steps_give_the_expected_tokens():
    async with serving() as rig:
        await rig.attach()
        tokens = list((await rig.stub.Forward(first())).result.tokens)
        for step_id in range(2, 20):
            result = (await rig.stub.Forward(following(step_id))).result
            assert (result.epoch, result.step_id, list(result.rows)) == (1, step_id, [0])
            tokens += result.tokens
        assert tokens == wanted(19)
        assert result.timings.HasField("queued") and result.timings.HasField("executed")


async def test_attach_answers_with_the_claimed_worker():
    async with serving() as rig:
        before = (await rig.stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest())).worker_info
        answer = await rig.attach(5)
        assert before.epoch == 0
        assert answer.contract_version == 1
        assert answer.worker_info.epoch == 5
        assert answer.worker_info.worker_id == "worker-7"
        assert answer.worker_info.incarnation_id == "life-1"
        before.epoch = 5
        assert answer.worker_info == before


async def test_plans_need_a_claim():
    async with serving() as rig:
        for epoch in (0, 1):
            refused = await refusal(rig.stub.Forward(first(epoch=epoch)))
            assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STALE_EPOCH")


@pytest.mark.parametrize("epoch", [0, 1, 2])
async def test_attach_needs_a_larger_epoch(epoch):
    async with serving() as rig:
        await rig.attach(2)
        refused = await refusal(rig.stub.Attach(attach_request(epoch)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STALE_EPOCH")
        assert rig.facade.worker_info().epoch == 2


async def test_attach_needs_a_shared_contract_version():
    async with serving() as rig:
        refused = await refusal(rig.stub.Attach(attach_request(1, 2, 9)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "CONTRACT_VERSION_MISMATCH")
        for minimum, maximum in ((0, 0), (0, 1), (2, 1)):
            refused = await refusal(rig.stub.Attach(attach_request(1, minimum, maximum)))
            assert (refused.code, refused.field) == (INVALID_ARGUMENT, "contract_versions")
        assert rig.facade.worker_info().epoch == 0
        answer = await rig.stub.Attach(attach_request(1, 1, 9))
        assert answer.contract_version == 1


async def test_a_new_epoch_fences_the_old_and_starts_anew():
    device = Device()
    async with serving(device) as rig:
        await rig.attach(1)
        await rig.stub.Forward(first())
        await rig.attach(2)
        assert (await refusal(rig.stub.Forward(following(2)))).reason == "STALE_EPOCH"
        # The executed step of the old epoch has no answer any more, either.
        assert (await refusal(rig.stub.Forward(first()))).reason == "STALE_EPOCH"
        assert (await refusal(rig.stub.Forward(following(2, epoch=2)))).reason == "STEP_GAP"
        # Row 0 is free again, and step 1 is next.
        result = (await rig.stub.Forward(first(epoch=2))).result
        assert list(result.tokens) == wanted(1)
        assert device.executed == [(1, 1), (2, 1)]


async def test_the_same_plan_again_gives_the_same_result_without_execution():
    device = Device()
    async with serving(device) as rig:
        await rig.attach()
        once = await rig.stub.Forward(first())
        again = await rig.stub.Forward(first())
        assert once == again
        await rig.stub.Forward(following(2))
        assert await rig.stub.Forward(first()) == once
        assert device.executed == [(1, 1), (1, 2)]


async def test_a_duplicate_in_flight_is_executed_once():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        calls = [rig.stub.Forward(first()) for _ in range(3)]
        gather = asyncio.gather(*calls)
        await device.entered()
        device.open()
        answers = await gather
        assert answers[0] == answers[1] == answers[2]
        assert device.executed == [(1, 1)]


async def test_another_plan_under_an_executed_step_is_a_conflict():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        refused = await refusal(rig.stub.Forward(first(output=NONE)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STEP_CONFLICT")
        assert list((await rig.stub.Forward(following(2))).result.tokens) == wanted(2)[1:]


async def test_results_are_kept_for_eight_steps():
    async with serving() as rig:
        await rig.attach()
        answers = [await rig.stub.Forward(first())]
        answers += [await rig.stub.Forward(following(step_id)) for step_id in range(2, 11)]
        for step_id in range(3, 11):
            assert await rig.stub.Forward(following(step_id)) == answers[step_id - 1]
        refused = await refusal(rig.stub.Forward(following(2)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STEP_RESULT_GONE")


async def test_a_skipped_step_is_refused_until_the_gap_is_filled():
    device = Device()
    async with serving(device) as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        refused = await refusal(rig.stub.Forward(following(3)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STEP_GAP")
        await rig.stub.Forward(following(2))
        assert list((await rig.stub.Forward(following(3))).result.tokens) == wanted(3)[2:]
        assert device.executed == [(1, 1), (1, 2), (1, 3)]


async def test_a_refused_plan_changes_nothing_and_keeps_its_step_id_free():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        # Wrong position, though it removes row 0 before: neither may happen.
        drifted = forward(2, remove=[0], rows=[1], start_positions=[9])
        refused = await refusal(rig.stub.Forward(drifted))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "PLAN_MISMATCH")
        assert list((await rig.stub.Forward(following(2))).result.tokens) == wanted(2)[1:]


async def test_other_weights_are_refused():
    device = Device()
    async with serving(device) as rig:
        await rig.attach()
        refused = await refusal(rig.stub.Forward(first(digest="0" * 64)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "WEIGHT_VERSION_MISMATCH")
        assert device.executed == []
        await rig.stub.Forward(first())


async def test_held_sampling_equals_inline():
    async with serving() as rig:
        await rig.attach()
        tokens = []
        for step_id in range(1, 8):
            request = first(output=HOLD) if step_id == 1 else following(step_id)
            held = (await rig.stub.Forward(request)).result
            assert (held.step_id, list(held.rows), list(held.tokens)) == (step_id, [], [])
            assert list(held.held_rows) == [0]
            result = (await rig.stub.Sample(sample(step_id))).result
            assert (result.epoch, result.step_id, list(result.rows)) == (1, step_id, [0])
            tokens += result.tokens
        assert tokens == wanted(7)


async def test_a_held_row_has_no_token_before_it_is_sampled():
    async with serving() as rig:
        await rig.attach()
        held = await rig.stub.Forward(first(output=HOLD))
        refused = await refusal(rig.stub.Forward(following(2)))
        assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "PLAN_MISMATCH")
        assert await rig.stub.Forward(first(output=HOLD)) == held
        await rig.stub.Sample(sample(1))
        await rig.stub.Forward(following(2))


def three_rows() -> model_runner_pb2.ForwardRequest:
    """Rows 0 and 2 hold, row 1 samples; all have the same prompt."""
    request = first(output=HOLD)
    for row, output in ((1, SAMPLE), (2, HOLD)):
        request.plan.added.append(
            added(row, PROMPT, range(11 + 10 * row, 21 + 10 * row), output=output)
        )
        request.plan.scheduled.rows.append(row)
        request.plan.scheduled.start_positions.append(0)
        request.plan.scheduled.token_counts.append(len(PROMPT))
    return request


async def test_a_late_mask_keeps_nobody_else_waiting():
    async with serving() as rig:
        await rig.attach()
        result = (await rig.stub.Forward(three_rows())).result
        assert (list(result.rows), list(result.tokens)) == ([1], wanted(1))
        assert list(result.held_rows) == [0, 2]
        # Row 1 goes on while the others wait, far beyond the steps whose results are kept.
        for step_id in range(2, 14):
            start = len(PROMPT) + step_id - 2
            result = (
                await rig.stub.Forward(
                    forward(step_id, rows=[1], start_positions=[start], source_step_distances=[1])
                )
            ).result
            assert (list(result.tokens), list(result.held_rows)) == (wanted(step_id)[-1:], [])
            if step_id == 3:  # one of the held rows is sampled, the other waits on
                result = (await rig.stub.Sample(sample(1, rows=[2]))).result
                assert (list(result.rows), list(result.tokens)) == ([2], wanted(1))
                refused = await refusal(rig.stub.Sample(sample(1, rows=[0, 2])))
                assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STEP_CONFLICT")
        assert list((await rig.stub.Sample(sample(1, rows=[0]))).result.tokens) == wanted(1)
        both = forward(
            14, rows=[0, 2], start_positions=[len(PROMPT)] * 2, source_step_distances=[13, 13]
        )
        result = (await rig.stub.Forward(both)).result
        assert (list(result.rows), list(result.held_rows)) == ([], [0, 2])
        result = (await rig.stub.Sample(sample(14, rows=[2, 0]))).result
        assert (list(result.rows), list(result.tokens)) == ([2, 0], wanted(2)[1:] * 2)


async def test_a_held_row_that_is_scheduled_or_removed_is_held_no_more():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(three_rows())
        literal = forward(
            2,
            remove=[0],
            rows=[2],
            start_positions=[len(PROMPT)],
            literal_token_counts=[1],
            literal_tokens=wanted(1),
        )
        assert list((await rig.stub.Forward(literal)).result.held_rows) == [2]
        for row in (0, 2, 7, 99):
            refused = await refusal(rig.stub.Sample(sample(1, rows=[row])))
            assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "ROW_NOT_HELD")
        assert list((await rig.stub.Sample(sample(2, rows=[2]))).result.tokens) == wanted(2)[1:]


async def test_sampling_again_gives_the_same_tokens_and_other_masks_are_a_conflict():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first(output=HOLD))
        once = await rig.stub.Sample(sample(1, masks={0: [11, 12]}))
        assert await rig.stub.Sample(sample(1, masks={0: [11, 12]})) == once
        for masks in (None, {0: [11]}):
            refused = await refusal(rig.stub.Sample(sample(1, masks=masks)))
            assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "STEP_CONFLICT")
        await rig.stub.Forward(following(2))
        assert await rig.stub.Sample(sample(1, masks={0: [11, 12]})) == once


async def test_only_held_rows_are_sampled():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        for step_id in (0, 1, 2):
            refused = await refusal(rig.stub.Sample(sample(step_id)))
            assert (refused.code, refused.reason) == (FAILED_PRECONDITION, "ROW_NOT_HELD")
        assert (await refusal(rig.stub.Sample(sample(1, epoch=2)))).reason == "STALE_EPOCH"


async def test_a_mask_takes_the_first_allowed_token_from_the_free_one_on():
    (free,) = wanted(1)
    cases = {
        (free,): free,
        (free - 2, free + 2): free + 2,
        (0, 1): 0,
        tuple(range(VOCABULARY)): free,
    }
    assert 3 < free < VOCABULARY - 3
    async with serving() as rig:
        for epoch, (allowed, token) in enumerate(cases.items(), start=1):
            await rig.attach(epoch)
            await rig.stub.Forward(first(epoch=epoch, output=HOLD))
            request = sample(1, epoch=epoch, masks={0: list(allowed)})
            assert list((await rig.stub.Sample(request)).result.tokens) == [token]
            # What was sampled is what a later step takes up.
            await rig.stub.Forward(following(2, epoch=epoch))
            followed = (await rig.stub.Sample(sample(2, epoch=epoch))).result
            assert (list(followed.tokens) == wanted(2)[1:]) == (token == free)


async def test_an_empty_mask_is_a_fault_of_its_row():
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first(output=HOLD))
        result = (await rig.stub.Sample(sample(1, masks={0: []}))).result
        assert (list(result.rows), list(result.tokens)) == ([], [])
        assert [(f.row, f.kind) for f in result.faults] == [(0, step_pb2.ROW_FAULT_KIND_EMPTY_MASK)]
        # Made before the fault was known: executed, for the sake of the plan's other rows.
        assert (await rig.stub.Forward(following(2))).result.step_id == 2


@pytest.mark.parametrize(
    ("masks", "field"),
    [
        (step_pb2.GrammarMasks(rows=[0], bitmasks=b"\0" * 15), "grammar_masks.bitmasks"),
        (step_pb2.GrammarMasks(rows=[], bitmasks=b"\0" * 16), "grammar_masks.bitmasks"),
        (step_pb2.GrammarMasks(rows=[1], bitmasks=b"\0" * 16), "grammar_masks.rows"),
        (step_pb2.GrammarMasks(rows=[0, 0], bitmasks=b"\0" * 32), "grammar_masks.rows"),
        (step_pb2.GrammarMasks(rows=[2**31], bitmasks=b"\0" * 16), "grammar_masks.rows"),
    ],
)
async def test_masks_that_do_not_fit_are_refused_and_the_row_stays_held(masks, field):
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first(output=HOLD))
        request = model_runner_pb2.SampleRequest(epoch=1, step_id=1, rows=[0], grammar_masks=masks)
        refused = await refusal(rig.stub.Sample(request))
        assert (refused.code, refused.reason) == (INVALID_ARGUMENT, "INVALID_PLAN")
        assert refused.field == field
        assert list((await rig.stub.Sample(sample(1))).result.tokens) == wanted(1)


async def test_row_faults_are_told_and_the_other_rows_go_on():
    def provoke(plan: StepPlan) -> list[RowFault]:
        return [RowFault(0, RowFaultKind.INVALID_LOGITS, "NaN")] if plan.step_id == 1 else []

    async with serving(provoke) as rig:
        await rig.attach()
        request = first()
        second = request.plan.added.add()
        second.CopyFrom(request.plan.added[0])
        second.row = 3
        second.block_ids[:] = range(20, 30)
        request.plan.scheduled.rows[:] = [0, 3]
        request.plan.scheduled.start_positions[:] = [0, 0]
        request.plan.scheduled.token_counts[:] = [len(PROMPT)] * 2
        result = (await rig.stub.Forward(request)).result
        assert (list(result.rows), list(result.tokens)) == ([3], wanted(1))
        (fault,) = result.faults
        assert (fault.row, fault.kind) == (0, step_pb2.ROW_FAULT_KIND_INVALID_LOGITS)


async def test_the_memory_pool_counts_the_blocks_in_tables():
    async with serving() as rig:
        await rig.attach()
        request = model_runner_pb2.GetMemoryPoolRequest()
        empty = (await rig.stub.GetMemoryPool(request)).memory_pool
        await rig.stub.Forward(first())
        full = (await rig.stub.GetMemoryPool(request)).memory_pool
        assert (empty.block_count, empty.block_token_count, empty.null_block_id) == (64, 4, 0)
        assert (empty.used_block_count, empty.free_block_count) == (0, 63)
        assert (full.used_block_count, full.free_block_count) == (10, 53)
        assert full.memory.kv_bytes == full.block_count * full.bytes_per_block

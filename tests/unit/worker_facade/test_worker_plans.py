"""Malformed and drifted plans as a table: code, reason, the field named, nothing changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.support.worker_rig import (
    PROMPT,
    Device,
    added,
    first,
    following,
    forward,
    refusal,
    serving,
    wanted,
)
from twinplane.worker.v1 import model_runner_pb2, step_pb2

Change = Callable[[step_pb2.StepPlan], Any]

SECOND = {"rows": [0], "start_positions": [len(PROMPT)]}
BLOCKS = range(20, 24)


def plan_with(**columns: Any) -> Change:
    """Step 2 with other columns."""

    def change(plan: step_pb2.StepPlan) -> None:
        plan.scheduled.CopyFrom(step_pb2.ScheduledRows(**(SECOND | columns)))

    return change


def plan_adding(sequence: step_pb2.AddedSequence, **changes: Any) -> Change:
    """Step 2 that also adds a sequence."""

    def change(plan: step_pb2.StepPlan) -> None:
        plan.added.add().CopyFrom(sequence)
        for name, value in changes.items():
            setattr(plan.added[0].sampling, name, value)

    return change


def without(path: str) -> Change:
    def change(plan: step_pb2.StepPlan) -> None:
        *parents, name = path.split(".")
        message: Any = plan
        for parent in parents:
            message = message[int(parent)] if parent.isdigit() else getattr(message, parent)
        message.ClearField(name)

    return change


def both(*changes: Change) -> Change:
    def change(plan: step_pb2.StepPlan) -> None:
        for each in changes:
            each(plan)

    return change


SOUND = added(1, [1, 2, 3], BLOCKS)

# What could follow from no state: INVALID_ARGUMENT, and the field.
INVALID: dict[str, tuple[str, Change]] = {
    "no weight version": ("plan.weight_version", without("weight_version")),
    "output unspecified": ("plan.added[0].output", plan_adding(added(1, [1], [20], output=0))),
    "output of a newer contract": (
        "plan.added[0].output",
        plan_adding(added(1, [1], [20], output=9)),
    ),
    "no prompt": (
        "plan.added[0].prompt_token_count",
        plan_adding(added(1, [1], [20], prompt_token_count=0)),
    ),
    "prompt longer than the tokens": (
        "plan.added[0].prompt_token_count",
        plan_adding(added(1, [1], [20], prompt_token_count=2)),
    ),
    "step zero": ("plan.step_id", lambda p: setattr(p, "step_id", 0)),
    "removed row out of range": ("plan.removed_rows", lambda p: p.removed_rows.append(8)),
    "removed row over int32": ("plan.removed_rows", lambda p: p.removed_rows.append(2**31)),
    "removed row twice": ("plan.removed_rows", lambda p: p.removed_rows.extend([0, 0])),
    "added row out of range": ("plan.added[0].row", plan_adding(added(8, [1], [20]))),
    "added row over int32": ("plan.added[0].row", plan_adding(added(2**32 - 1, [1], [20]))),
    "added without tokens": ("plan.added[0].token_ids", plan_adding(added(1, [], [20]))),
    "added too long": ("plan.added[0].token_ids", plan_adding(added(1, [1] * 41, BLOCKS))),
    "added token out of range": ("plan.added[0].token_ids", plan_adding(added(1, [101], [20]))),
    "added token over int32": ("plan.added[0].token_ids", plan_adding(added(1, [2**31], [20]))),
    "added null block": ("plan.added[0].block_ids", plan_adding(added(1, [1], [0]))),
    "added block out of range": ("plan.added[0].block_ids", plan_adding(added(1, [1], [64]))),
    "added too many blocks": ("plan.added[0].block_ids", plan_adding(added(1, [1], range(1, 12)))),
    "added computed whole": (
        "plan.added[0].computed_token_count",
        plan_adding(added(1, [1, 2], [20], computed=2)),
    ),
    "added computed over int32": (
        "plan.added[0].computed_token_count",
        plan_adding(added(1, [1, 2], [20], computed=2**31)),
    ),
    "added computed beyond its blocks": (
        "plan.added[0].computed_token_count",
        plan_adding(added(1, [1] * 6, [20], computed=5)),
    ),
    "no sampling parameters": (
        "plan.added[0].sampling",
        both(plan_adding(SOUND), without("added.0.sampling")),
    ),
    "no seed": (
        "plan.added[0].sampling.seed",
        both(plan_adding(SOUND), without("added.0.sampling.seed")),
    ),
    "temperature NaN": (
        "plan.added[0].sampling.temperature",
        plan_adding(SOUND, temperature=math.nan),
    ),
    "temperature infinite": (
        "plan.added[0].sampling.temperature",
        plan_adding(SOUND, temperature=math.inf),
    ),
    "temperature negative": (
        "plan.added[0].sampling.temperature",
        plan_adding(SOUND, temperature=-0.5),
    ),
    "a draft too many": (
        "plan.scheduled.draft_counts",
        plan_with(rows=[0], start_positions=[6], source_step_distances=[1], draft_counts=[1]),
    ),
    "drafts for other rows": (
        "plan.scheduled.draft_counts",
        plan_with(rows=[0], start_positions=[6], draft_counts=[0, 0]),
    ),
    "literal drafts without a count": (
        "plan.scheduled.literal_drafts",
        plan_with(rows=[0], start_positions=[6], source_step_distances=[1], literal_drafts=[1]),
    ),
    "more literal drafts than drafts": (
        "plan.scheduled.literal_draft_counts",
        plan_with(
            rows=[0],
            start_positions=[6],
            source_step_distances=[1],
            literal_draft_counts=[1],
            literal_drafts=[1],
        ),
    ),
    "open before the first step": (
        "plan.scheduled.open_step_distances",
        plan_with(rows=[0], start_positions=[6], open_step_distances=[2]),
    ),
    "top_p zero": ("plan.added[0].sampling.top_p", plan_adding(SOUND, top_p=0.0)),
    "top_p above one": ("plan.added[0].sampling.top_p", plan_adding(SOUND, top_p=1.5)),
    "top_p NaN": ("plan.added[0].sampling.top_p", plan_adding(SOUND, top_p=math.nan)),
    "min_p negative": ("plan.added[0].sampling.min_p", plan_adding(SOUND, min_p=-0.1)),
    "min_p NaN": ("plan.added[0].sampling.min_p", plan_adding(SOUND, min_p=math.nan)),
    "scheduled row out of range": ("plan.scheduled.rows", plan_with(rows=[8])),
    "scheduled row over int32": ("plan.scheduled.rows", plan_with(rows=[2**31])),
    "scheduled row twice": (
        "plan.scheduled.rows",
        plan_with(rows=[0, 0], start_positions=[6, 6]),
    ),
    "start positions short": (
        "plan.scheduled.start_positions",
        plan_with(rows=[0, 1], start_positions=[6]),
    ),
    "start positions omitted": ("plan.scheduled.start_positions", plan_with(start_positions=[])),
    "start positions without rows": ("plan.scheduled.start_positions", plan_with(rows=[])),
    "start position over int32": (
        "plan.scheduled.start_positions",
        plan_with(start_positions=[2**32 - 1]),
    ),
    "token counts long": ("plan.scheduled.token_counts", plan_with(token_counts=[1, 1])),
    "no token": ("plan.scheduled.token_counts", plan_with(token_counts=[0])),
    "token count over int32": (
        "plan.scheduled.token_counts",
        plan_with(token_counts=[2**31]),
    ),
    "more tokens than a step takes": (
        "plan.scheduled.token_counts",
        plan_with(token_counts=[65]),
    ),
    "past the longest sequence": (
        "plan.scheduled.token_counts",
        plan_with(token_counts=[36], literal_token_counts=[36], literal_tokens=[1] * 36),
    ),
    "source distances long": (
        "plan.scheduled.source_step_distances",
        plan_with(source_step_distances=[1, 1]),
    ),
    "source before the first step": (
        "plan.scheduled.source_step_distances",
        plan_with(source_step_distances=[2]),
    ),
    "source beside literal tokens": (
        "plan.scheduled.source_step_distances",
        plan_with(source_step_distances=[1], literal_token_counts=[1], literal_tokens=[3]),
    ),
    "literal counts long": (
        "plan.scheduled.literal_token_counts",
        plan_with(literal_token_counts=[1, 0], literal_tokens=[3]),
    ),
    "literal counts neither none nor all": (
        "plan.scheduled.literal_token_counts",
        plan_with(token_counts=[3], literal_token_counts=[2], literal_tokens=[3, 4]),
    ),
    "literal tokens missing": (
        "plan.scheduled.literal_tokens",
        plan_with(literal_token_counts=[1]),
    ),
    "literal tokens uncounted": ("plan.scheduled.literal_tokens", plan_with(literal_tokens=[3])),
    "literal tokens without rows": (
        "plan.scheduled.literal_tokens",
        plan_with(rows=[], start_positions=[], literal_tokens=[3]),
    ),
    "literal token out of range": (
        "plan.scheduled.literal_tokens",
        plan_with(literal_token_counts=[1], literal_tokens=[101]),
    ),
    "literal token over int32": (
        "plan.scheduled.literal_tokens",
        plan_with(literal_token_counts=[1], literal_tokens=[2**31 + 3]),
    ),
    "appended counts long": (
        "plan.scheduled.appended_block_counts",
        plan_with(appended_block_counts=[1, 0], appended_blocks=[20]),
    ),
    "appended blocks uncounted": (
        "plan.scheduled.appended_blocks",
        plan_with(appended_blocks=[20]),
    ),
    "appended blocks missing": (
        "plan.scheduled.appended_blocks",
        plan_with(appended_block_counts=[1]),
    ),
    "appended null block": (
        "plan.scheduled.appended_blocks",
        plan_with(appended_block_counts=[1], appended_blocks=[0]),
    ),
    "appended block out of range": (
        "plan.scheduled.appended_blocks",
        plan_with(appended_block_counts=[1], appended_blocks=[64]),
    ),
    "more blocks than a row has": (
        "plan.scheduled.appended_blocks",
        plan_with(
            source_step_distances=[1], appended_block_counts=[1], appended_blocks=[20]
        ),
    ),
}  # fmt: skip

# What does not follow from this state: FAILED_PRECONDITION.
DRIFTED: dict[str, Change] = {
    "removed row is free": lambda p: p.removed_rows.append(1),
    "added row is taken": plan_adding(added(0, [1], [20])),
    "added row twice": both(plan_adding(SOUND), plan_adding(SOUND)),
    "scheduled row is free": plan_with(rows=[1]),
    "scheduled row was removed": lambda p: p.removed_rows.append(0),
    "position behind": plan_with(start_positions=[5], source_step_distances=[1]),
    "position ahead": plan_with(start_positions=[7], source_step_distances=[1]),
    "no token is held": plan_with(),
    "too many tokens": plan_with(token_counts=[2], source_step_distances=[1]),
    "too few blocks": both(
        plan_adding(added(1, [1, 2, 3, 4, 5], [20])),
        plan_with(
            rows=[0, 1],
            start_positions=[6, 0],
            token_counts=[1, 5],
            source_step_distances=[1, 0],
        ),
    ),
    "source of a row that sampled nothing": both(
        plan_adding(SOUND),
        plan_with(rows=[1], start_positions=[0], token_counts=[4], source_step_distances=[1]),
    ),
}


async def check(change: Change, code: grpc.StatusCode, reason: str, field: str) -> None:
    device = Device()
    async with serving(device) as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        pool = await rig.facade.memory_pool()
        request = following(2)
        change(request.plan)
        for _ in range(2):
            refused = await refusal(rig.stub.Forward(request))
            assert (refused.code, refused.reason, refused.field) == (code, reason, field)
        assert device.executed == [(1, 1)]
        assert await rig.facade.memory_pool() == pool
        assert list((await rig.stub.Forward(following(2))).result.tokens) == wanted(2)[1:]


@pytest.mark.parametrize(("field", "change"), INVALID.values(), ids=INVALID)
async def test_malformed_plans(field: str, change: Change) -> None:
    await check(change, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PLAN", field)


@pytest.mark.parametrize("change", DRIFTED.values(), ids=DRIFTED)
async def test_drifted_plans(change: Change) -> None:
    await check(change, grpc.StatusCode.FAILED_PRECONDITION, "PLAN_MISMATCH", "")


async def test_a_request_without_a_plan() -> None:
    async with serving() as rig:
        refused = await refusal(rig.stub.Forward(model_runner_pb2.ForwardRequest()))
        assert (refused.reason, refused.field) == ("INVALID_PLAN", "plan")


def unknown(prefix: bytes) -> bytes:
    """A length-delimited field 100 around, or beside, the fields of `prefix`."""
    return prefix + b"\xa2\x06\x02hi"


async def test_fields_of_a_newer_contract_are_refused_wherever_they_are() -> None:
    request = following(2)
    plan = request.plan
    in_request = unknown(request.SerializeToString())
    in_plan = model_runner_pb2.ForwardRequest()
    in_plan.plan.MergeFromString(unknown(plan.SerializeToString()))
    in_rows = model_runner_pb2.ForwardRequest(plan=plan)
    in_rows.plan.scheduled.MergeFromString(unknown(b""))
    async with serving() as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        for raw in (in_request, in_plan.SerializeToString(), in_rows.SerializeToString()):
            newer = model_runner_pb2.ForwardRequest.FromString(raw)
            refused = await refusal(rig.stub.Forward(newer))
            assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "forward")
        sample = model_runner_pb2.SampleRequest.FromString(unknown(b"\x08\x01"))
        assert (await refusal(rig.stub.Sample(sample))).field == "sample"
        await rig.stub.Forward(following(2))


async def test_every_top_k_of_the_contract_is_taken() -> None:
    async with serving() as rig:
        await rig.attach()
        request = forward(1)
        plan_adding(SOUND, top_k=2**31 - 1)(request.plan)
        assert (await rig.stub.Forward(request)).result.step_id == 1

"""Either plane's plan and result values across the wire: what one meant is what the other reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.core import plan as control
from control_plane.core.request import SamplingParams
from control_plane.rpc import convert as control_convert
from tests.support.worker_rig import MODEL, simulated_runner
from twinplane.worker.v1 import info_pb2, model_runner_pb2, step_pb2
from worker_service.domain import capability, errors
from worker_service.domain import plan as worker
from worker_service.facade import WorkerInfo
from worker_service.rpc import convert as worker_convert

MAX_WIRE_BYTES = 8 * 1024

uint31 = st.integers(0, 2**31 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(allow_nan=False, allow_infinity=False, width=32)
columns = st.lists(uint31, max_size=5)


@st.composite
def added(draw: st.DrawFn) -> control.AddedSequence:
    return control.AddedSequence(
        row=draw(uint31),
        token_ids=draw(columns),
        prompt_token_count=draw(uint31),
        output=draw(st.sampled_from(control.OutputKind)),
        sampling=SamplingParams(draw(float32), draw(uint31), draw(float32), draw(float32)),
        seed=draw(uint64),
        block_ids=draw(columns),
        computed_token_count=draw(uint31),
    )


@st.composite
def scheduled(draw: st.DrawFn) -> control.ScheduledRows:
    rows = draw(columns)

    def column(largest: int = 2**31 - 1) -> list[int]:
        entry = st.integers(0, largest)
        return draw(st.lists(entry, min_size=len(rows), max_size=len(rows)))

    literal_counts, block_counts = column(2), column(2)
    literal = st.lists(uint31, min_size=sum(literal_counts), max_size=sum(literal_counts))
    blocks = st.lists(uint31, min_size=sum(block_counts), max_size=sum(block_counts))
    literal_draft_counts = column(2)
    draft_count = sum(literal_draft_counts)
    drafts = st.lists(uint31, min_size=draft_count, max_size=draft_count)
    return control.ScheduledRows(
        rows=rows,
        start_positions=column(),
        token_counts=draw(st.sampled_from([[1] * len(rows), column()])),
        source_step_distances=draw(st.sampled_from([[0] * len(rows), column()])),
        literal_token_counts=literal_counts,
        literal_tokens=draw(literal),
        appended_block_counts=block_counts,
        appended_blocks=draw(blocks),
        draft_counts=column(3),
        literal_draft_counts=literal_draft_counts,
        literal_drafts=draw(drafts),
        open_step_distances=column(),
    )


@st.composite
def plans(draw: st.DrawFn) -> control.StepPlan:
    return control.StepPlan(
        epoch=draw(uint64),
        step_id=draw(uint64),
        weight_version=control.WeightVersion(draw(uint64), draw(st.text(max_size=4))),
        removed_rows=draw(columns),
        added=draw(st.lists(added(), max_size=2)),
        scheduled=draw(scheduled()),
    )


def across(plan: control.StepPlan) -> worker.StepPlan:
    request = model_runner_pb2.ForwardRequest(plan=control_convert.plan_to_pb(plan))
    wire = request.SerializeToString()
    return worker_convert.forward_from_pb(model_runner_pb2.ForwardRequest.FromString(wire))


COLUMNS = (
    "rows",
    "start_positions",
    "token_counts",
    "source_step_distances",
    "literal_token_counts",
    "literal_tokens",
    "appended_block_counts",
    "appended_blocks",
    "draft_counts",
    "literal_draft_counts",
    "literal_drafts",
    "open_step_distances",
)
DRAFT_COLUMNS = ("draft_counts", "literal_draft_counts", "open_step_distances")


@given(plans())
def test_a_plan_means_the_same_to_the_worker(sent: control.StepPlan) -> None:
    got = across(sent)
    assert (got.epoch, got.step_id) == (sent.epoch, sent.step_id)
    assert got.weight_version.generation == sent.weight_version.generation
    assert got.weight_version.digest == sent.weight_version.digest
    assert got.removed_rows.tolist() == sent.removed_rows
    for name in COLUMNS:
        column = getattr(got.scheduled, name)
        assert column.dtype == np.int32
        expected = getattr(sent.scheduled, name)
        if name in DRAFT_COLUMNS and not any(expected):
            expected = []
        assert column.tolist() == expected, name
    assert len(got.added) == len(sent.added)
    for mine, theirs in zip(got.added, sent.added, strict=True):
        assert (mine.row, mine.computed_token_count) == (theirs.row, theirs.computed_token_count)
        assert mine.prompt_token_count == theirs.prompt_token_count
        assert mine.output.name == theirs.output.name
        assert mine.token_ids.tolist() == theirs.token_ids
        assert mine.block_ids.tolist() == theirs.block_ids
        sampling = theirs.sampling
        assert mine.sampling == worker.SamplingParameters(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, theirs.seed
        )


@given(plans(), plans())
def test_equal_plans_and_only_those_have_equal_fingerprints(one, other) -> None:
    assert across(one).fingerprint() == across(one).fingerprint()
    if control_convert.plan_to_pb(one) != control_convert.plan_to_pb(other):
        assert across(one).fingerprint() != across(other).fingerprint()


@st.composite
def results(draw: st.DrawFn) -> worker.StepResult:
    rows = draw(columns)
    counts = draw(
        st.sampled_from([[1] * len(rows), draw(st.lists(st.integers(0, 3), min_size=len(rows),
                                                        max_size=len(rows)))])
    )  # fmt: skip
    tokens = draw(st.lists(uint31, min_size=sum(counts), max_size=sum(counts)))
    fault = st.builds(
        worker.RowFault, uint31, st.sampled_from(worker.RowFaultKind), st.text(max_size=5)
    )
    seconds = st.floats(0, 1e6)
    return worker.StepResult(
        epoch=draw(uint64),
        step_id=draw(uint64),
        rows=np.array(rows, dtype=np.int32),
        token_counts=np.array(counts, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        held_rows=np.array(draw(columns), dtype=np.int32),
        faults=tuple(draw(st.lists(fault, max_size=2))),
        queued_seconds=draw(seconds),
        executed_seconds=draw(seconds),
    )


@given(results())
def test_a_result_means_the_same_to_the_control_plane(sent: worker.StepResult) -> None:
    wire = worker_convert.result_to_pb(sent).SerializeToString()
    got = control_convert.result_from_pb(step_pb2.StepResult.FromString(wire))
    assert (got.epoch, got.step_id) == (sent.epoch, sent.step_id)
    assert got.rows == sent.rows.tolist()
    assert got.token_counts == sent.token_counts.tolist()
    assert got.tokens.ids == sent.tokens.tolist()
    assert [(f.row, f.kind, f.detail) for f in got.faults] == [
        (f.row, f.kind.name.lower(), f.detail) for f in sent.faults
    ]
    assert math.isclose(got.queued_seconds, sent.queued_seconds, abs_tol=1e-9)
    assert math.isclose(got.executed_seconds, sent.executed_seconds, abs_tol=1e-9)


def test_a_capability_means_the_same_to_the_control_plane() -> None:
    capability = simulated_runner().capability()
    info = WorkerInfo(capability, "worker-0", "life-1", 2**64 - 1)
    wire = worker_convert.info_to_pb(info).SerializeToString()
    got = control_convert.info_from_pb(info_pb2.WorkerInfo.FromString(wire))
    assert (got.worker_id, got.incarnation_id, got.epoch) == ("worker-0", "life-1", 2**64 - 1)
    assert got.model_name == capability.model.name
    assert got.vocabulary_size == capability.model.vocabulary_size
    assert got.weight_version.generation == capability.weight_version.generation
    assert got.weight_version.digest == capability.weight_version.digest
    for name in ("sequence", "step_token", "sequence_token", "prompt_token", "inflight_step"):
        limit = f"max_{name}_count"
        assert getattr(got, limit) == getattr(capability.limits, limit)
    assert got.features == {feature.name.lower() for feature in capability.features}
    assert got.rank_count == capability.ranks.tensor[1] * capability.ranks.pipeline[1]


def test_a_memory_pool_means_the_same_to_the_control_plane() -> None:
    pool = simulated_runner().memory_pool()
    wire = worker_convert.pool_to_pb(pool).SerializeToString()
    got = control_convert.pool_from_pb(info_pb2.MemoryPool.FromString(wire))
    assert (got.block_count, got.block_size) == (MODEL.block_count, MODEL.block_size)


@pytest.mark.parametrize(
    "enumeration", [capability.DeviceKind, capability.DataType, capability.Feature]
)
def test_every_value_has_its_own_number(enumeration) -> None:
    to_pb = {
        capability.DeviceKind: worker_convert._device_kind_to_pb,
        capability.DataType: worker_convert._data_type_to_pb,
        capability.Feature: worker_convert._feature_to_pb,
    }[enumeration]
    numbers = [to_pb(value) for value in enumeration]
    assert 0 not in numbers
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("name", COLUMNS)
def test_no_column_reaches_the_worker_with_numbers_over_int32(name: str) -> None:
    """Not even as negative ones: that they are refused is not left to later checks."""
    one_row = {column: [1] for column in COLUMNS} | {name: [2**31]}
    request = model_runner_pb2.ForwardRequest(
        plan=step_pb2.StepPlan(
            epoch=1,
            step_id=1,
            weight_version={"generation": 1},
            scheduled=step_pb2.ScheduledRows(**one_row),
        )
    )
    with pytest.raises(errors.PlanInvalid, match=f"plan.scheduled.{name}: must be at most"):
        worker_convert.forward_from_pb(request)


def test_a_decode_step_of_256_rows_costs_a_few_kilobytes_each_way() -> None:
    """At its worst: every row takes a block, positions and ids are three bytes each."""
    rows = list(range(256))
    zeros = [0] * 256
    plan = control.StepPlan(
        epoch=2**40,
        step_id=2**40,
        weight_version=control.WeightVersion(1, "ab" * 32),
        removed_rows=[],
        added=[],
        scheduled=control.ScheduledRows(
            rows=rows,
            start_positions=[131_071] * 256,
            token_counts=[1] * 256,
            source_step_distances=[1] * 256,
            literal_token_counts=zeros,
            literal_tokens=[],
            appended_block_counts=[1] * 256,
            appended_blocks=[2_000_000] * 256,
        ),
    )
    request = model_runner_pb2.ExecuteRequest(
        forward=model_runner_pb2.ForwardRequest(plan=control_convert.plan_to_pb(plan))
    )
    ones = np.ones(256, dtype=np.int32)
    result = worker.StepResult(
        epoch=2**40,
        step_id=2**40,
        rows=np.array(rows, dtype=np.int32),
        token_counts=ones,
        tokens=ones * 151_935,
        queued_seconds=0.123456789,
        executed_seconds=0.123456789,
    )
    response = model_runner_pb2.ExecuteResponse(
        forward=model_runner_pb2.ForwardResponse(result=worker_convert.result_to_pb(result))
    )
    assert request.ByteSize() <= MAX_WIRE_BYTES
    assert response.ByteSize() <= MAX_WIRE_BYTES
    print(f"plan {request.ByteSize()} bytes, result {response.ByteSize()} bytes")

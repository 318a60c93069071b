"""Control plane step values to messages and back, against the worker's reading of them."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from control_plane.core.plan import (
    AddedSequence,
    BlockId,
    GrammarMasks,
    OutputKind,
    Row,
    RowFault,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    WeightVersion,
)
from control_plane.core.request import SamplingParams
from control_plane.rpc.convert import (
    info_from_pb,
    plan_to_pb,
    pool_from_pb,
    result_from_pb,
    sample_to_pb,
)
from control_plane.shell.ports import HELD_SAMPLING
from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import info_pb2, model_runner_pb2, step_pb2
from worker_service.domain import plan as domain
from worker_service.domain.sampling import SamplingParameters
from worker_service.rpc import convert as worker_convert

VERSION = WeightVersion(3, "d" * 64)


def plan(scheduled: ScheduledRows, **changes: object) -> StepPlan:
    values: dict[str, object] = {
        "epoch": 7,
        "step_id": 1234,
        "weight_version": VERSION,
        "removed_rows": [],
        "added": [],
        "scheduled": scheduled,
    }
    return StepPlan(**(values | changes))  # type: ignore[arg-type]


def decode_rows(count: int, rng: random.Random) -> ScheduledRows:
    """A decode step at its most expensive usual form: long contexts, tokens from a step in
    flight, a new block for one row in sixteen."""
    appended = [int(row % 16 == 0) for row in range(count)]
    return ScheduledRows(
        rows=[Row(row) for row in range(count)],
        start_positions=[rng.randrange(4000, 8000) for _ in range(count)],
        token_counts=[1] * count,
        source_step_distances=[1] * count,
        literal_token_counts=[0] * count,
        appended_block_counts=appended,
        appended_blocks=[BlockId(rng.randrange(10_000, 100_000)) for _ in range(sum(appended))],
    )


def as_worker_reads(sent: StepPlan) -> domain.StepPlan:
    message = model_runner_pb2.ForwardRequest(plan=plan_to_pb(sent)).SerializeToString()
    return worker_convert.forward_from_pb(model_runner_pb2.ForwardRequest.FromString(message))


def test_the_worker_reads_what_was_planned() -> None:
    rng = random.Random(1)
    scheduled = ScheduledRows(
        rows=[Row(4), Row(0), Row(9)],
        start_positions=[0, 17, 3],
        token_counts=[5, 1, 2],
        source_step_distances=[0, 2, 0],
        literal_token_counts=[0, 0, 1],
        literal_tokens=[49151],
        appended_block_counts=[1, 0, 2],
        appended_blocks=[BlockId(8), BlockId(5), BlockId(6)],
        draft_counts=[0, 0, 1],
        literal_draft_counts=[0, 0, 1],
        literal_drafts=[11],
        open_step_distances=[0, 2, 0],
    )
    added = AddedSequence(
        row=Row(4),
        token_ids=[rng.randrange(49152) for _ in range(5)],
        prompt_token_count=3,
        output=OutputKind.SAMPLE,
        sampling=SamplingParams(temperature=0.5, top_k=40, top_p=0.75, min_p=0.125),
        seed=2**64 - 1,
        block_ids=[BlockId(3)],
        computed_token_count=4,
    )
    sent = plan(scheduled, removed_rows=[Row(1), Row(2)], added=[added])
    read = as_worker_reads(sent)
    assert (read.epoch, read.step_id) == (7, 1234)
    assert (read.weight_version.generation, read.weight_version.digest) == (3, "d" * 64)
    assert read.removed_rows.tolist() == [1, 2]
    for name in domain.ScheduledRows.__slots__:
        assert getattr(read.scheduled, name).tolist() == getattr(scheduled, name), name
    (sequence,) = read.added
    assert sequence.row == 4
    assert sequence.token_ids.tolist() == added.token_ids
    assert sequence.block_ids.tolist() == [3]
    assert sequence.computed_token_count == 4
    assert sequence.sampling == SamplingParameters(0.5, 40, 0.75, 0.125, 2**64 - 1)


def test_columns_that_say_nothing_are_sent_empty_and_read_full() -> None:
    scheduled = decode_rows(20, random.Random(2))
    message = plan_to_pb(plan(scheduled))
    assert not message.scheduled.token_counts
    assert not message.scheduled.literal_token_counts
    assert len(message.scheduled.source_step_distances) == 20
    read = as_worker_reads(plan(scheduled))
    assert read.scheduled.token_counts.tolist() == [1] * 20
    assert read.scheduled.literal_token_counts.tolist() == [0] * 20


@pytest.mark.parametrize("counts", [[1, 1, 2], [2, 1, 1], [2, 2, 2]])
def test_counts_that_say_something_are_sent(counts: list[int]) -> None:
    scheduled = ScheduledRows(
        rows=[Row(0), Row(1), Row(2)],
        start_positions=[0, 0, 0],
        token_counts=counts,
        source_step_distances=[0, 0, 0],
        literal_token_counts=[0, 0, 0],
        appended_block_counts=[0, 0, 0],
    )
    assert list(plan_to_pb(plan(scheduled)).scheduled.token_counts) == counts


def test_columns_about_drafts_are_sent_where_there_are_any() -> None:
    scheduled = decode_rows(3, random.Random(3))
    scheduled.draft_counts.extend([0, 0, 0])
    scheduled.open_step_distances.extend([0, 0, 0])
    message = plan_to_pb(plan(scheduled)).scheduled
    assert not message.draft_counts and not message.open_step_distances
    scheduled.draft_counts[1] = 2
    scheduled.open_step_distances[2] = 1
    message = plan_to_pb(plan(scheduled)).scheduled
    assert (list(message.draft_counts), list(message.open_step_distances)) == (
        [0, 2, 0],
        [0, 0, 1],
    )
    read = as_worker_reads(plan(scheduled)).scheduled
    assert (read.draft_counts.tolist(), read.open_step_distances.tolist()) == (
        [0, 2, 0],
        [0, 0, 1],
    )


def test_a_plan_that_only_removes_has_no_scheduled_rows() -> None:
    message = plan_to_pb(plan(ScheduledRows(), removed_rows=[Row(3)]))
    assert not message.HasField("scheduled")
    assert as_worker_reads(plan(ScheduledRows(), removed_rows=[Row(3)])).scheduled.rows.size == 0


@pytest.mark.parametrize("kind", list(OutputKind))
def test_output_kinds_mean_the_same_on_both_sides(kind: OutputKind) -> None:
    added = AddedSequence(Row(0), [1, 2, 3], 2, SamplingParams(), 0, kind, [], 0)
    (sequence,) = as_worker_reads(plan(ScheduledRows(), added=[added])).added
    assert (sequence.output.name, sequence.prompt_token_count) == (kind.name, 2)


def test_every_sampling_parameter_of_the_proto_is_one_of_the_core() -> None:
    names = {field.name for field in types_pb2.SamplingParameters.DESCRIPTOR.fields}
    assert names == {"seed", *(field.name for field in fields(SamplingParams))}


def test_the_sampling_of_held_rows_is_read_as_it_was_meant() -> None:
    sent = SamplePlan(7, 9, [Row(3), Row(1)], GrammarMasks([Row(1)], bytes(range(8))))
    wire = sample_to_pb(sent).SerializeToString()
    read = worker_convert.sample_from_pb(
        model_runner_pb2.SampleRequest.FromString(wire), vocabulary_size=50
    )
    assert (read.epoch, read.step_id, read.rows.tolist()) == (7, 9, [3, 1])
    assert read.masks is not None
    assert read.masks.rows.tolist() == [1]
    assert read.masks.bitmasks.tolist() == [[0x03020100, 0x07060504]]
    free = worker_convert.sample_from_pb(sample_to_pb(replace(sent, masks=None)), 50)
    assert free.masks is None


def test_a_greedy_temperature_survives() -> None:
    """0 is not unset."""
    sampling = SamplingParams(temperature=0.0)
    added = AddedSequence(Row(0), [1], 1, sampling, 0, OutputKind.SAMPLE, [], 0)
    (sequence,) = as_worker_reads(plan(ScheduledRows(), added=[added])).added
    assert sequence.sampling.temperature == 0.0
    assert sequence.sampling.seed == 0


def test_a_result_is_read_as_the_worker_meant_it() -> None:
    sent = domain.StepResult(
        epoch=7,
        step_id=9,
        rows=np.array([5, 2], dtype=np.int32),
        token_counts=np.array([1, 1], dtype=np.int32),
        tokens=np.array([49151, 0], dtype=np.int32),
        faults=(domain.RowFault(3, domain.RowFaultKind.INVALID_LOGITS, "nan"),),
        queued_seconds=0.25,
        executed_seconds=1.5,
    )
    message = worker_convert.result_to_pb(sent)
    assert not message.token_counts
    read = result_from_pb(step_pb2.StepResult.FromString(message.SerializeToString()))
    assert (read.epoch, read.step_id) == (7, 9)
    assert (read.rows, read.token_counts, read.tokens.ids) == ([5, 2], [1, 1], [49151, 0])
    assert read.faults == [RowFault(Row(3), "invalid_logits", "nan")]
    assert (read.queued_seconds, read.executed_seconds) == (0.25, 1.5)


def test_capability_and_pool() -> None:
    info = info_from_pb(
        info_pb2.WorkerInfo(
            worker_id="w",
            incarnation_id="i",
            epoch=4,
            device=info_pb2.Device(kind=info_pb2.DEVICE_KIND_CUDA, name="H200", index=1),
            model=info_pb2.Model(
                name="m",
                architecture="LlamaForCausalLM",
                vocabulary_size=100,
                data_type=info_pb2.DATA_TYPE_BFLOAT16,
            ),
            limits=info_pb2.Limits(max_sequence_count=8, max_inflight_step_count=4),
            features=[info_pb2.FEATURE_HELD_SAMPLING, 99],
            ranks=info_pb2.RankCoordinates(tensor_size=4, pipeline_size=2),
        )
    )
    assert (info.worker_id, info.incarnation_id, info.epoch) == ("w", "i", 4)
    assert info.device == "cuda:1 H200"
    assert info.max_sequence_count == 8
    assert info.features == {HELD_SAMPLING, "99"}, "an unknown feature is no error"
    assert info.rank_count == 8
    assert info_from_pb(info_pb2.WorkerInfo()).rank_count == 1
    pool = pool_from_pb(info_pb2.MemoryPool(block_count=10, block_token_count=16))
    assert (pool.block_count, pool.block_size) == (10, 16)


def test_a_decode_step_of_256_rows_costs_at_most_8_kb_each_way() -> None:
    message = model_runner_pb2.ExecuteRequest(
        forward=model_runner_pb2.ForwardRequest(
            plan=plan_to_pb(plan(decode_rows(256, random.Random(4))))
        )
    )
    assert message.ByteSize() <= 8000
    rows = np.arange(256, dtype=np.int32)
    result = domain.StepResult(
        7, 1234, rows, np.ones(256, dtype=np.int32), np.full(256, 150_000, dtype=np.int32)
    )
    answer = model_runner_pb2.ExecuteResponse(
        forward=model_runner_pb2.ForwardResponse(result=worker_convert.result_to_pb(result))
    )
    assert answer.ByteSize() <= 8000

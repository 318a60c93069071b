"""Converts the control plane's step values to messages of the worker's contract, and back.

Columns go in and out by `extend` and `list`, never by a loop over rows: a plan of 256 rows must
cost well under a millisecond. A column that holds only the value that an empty one stands for is
sent empty, as step.proto allows.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import assert_never

from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from control_plane.core.plan import (
    AddedSequence,
    GrammarMasks,
    Message,
    OutputKind,
    Row,
    RowFault,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from control_plane.core.request import SamplingParams
from control_plane.core.tokens import Tokens
from control_plane.shell.ports import (
    Attachment,
    MemoryPool,
    PreparedUpdate,
    RankCoordinates,
    WorkerInfo,
)
from control_plane.shell.ranks import Rendezvous
from control_plane.shell.workers import ServingWorker, WorkerState
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2
from twinplane.worker.v1 import info_pb2, model_runner_pb2, step_pb2

_SAMPLING_NAMES = tuple(field.name for field in fields(SamplingParams))
_CONVERTED = ("state", "away_seconds", "replica_state")
_SERVING_WORKER_NAMES = tuple(
    field.name for field in fields(ServingWorker) if field.name not in _CONVERTED
)
_FEATURE_PREFIX = "FEATURE_"
_DEVICE_KIND_PREFIX = "DEVICE_KIND_"
_ROW_FAULT_KIND_PREFIX = "ROW_FAULT_KIND_"


def plan_to_pb(plan: StepPlan) -> step_pb2.StepPlan:
    """A plan as it goes to the worker."""
    return step_pb2.StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        weight_version=types_pb2.WeightVersion(
            generation=plan.weight_version.generation, digest=plan.weight_version.digest
        ),
        removed_rows=plan.removed_rows,
        added=[_added_to_pb(sequence) for sequence in plan.added],
        scheduled=_scheduled_to_pb(plan.scheduled) if plan.scheduled.rows else None,
    )


def sample_to_pb(plan: SamplePlan) -> model_runner_pb2.SampleRequest:
    """The sampling of held rows as it goes to the worker."""
    return model_runner_pb2.SampleRequest(
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=plan.rows,
        grammar_masks=None if plan.masks is None else _masks_to_pb(plan.masks),
    )


def _masks_to_pb(masks: GrammarMasks) -> step_pb2.GrammarMasks:
    return step_pb2.GrammarMasks(rows=masks.rows, bitmasks=masks.bitmasks)


def result_from_pb(result: step_pb2.StepResult) -> StepResult:
    """A result as the core takes it: the counts column is always full."""
    rows = list(map(Row, result.rows))
    timings = result.timings
    return StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        rows=rows,
        token_counts=list(result.token_counts) or [1] * len(rows),
        tokens=Tokens(list(result.tokens)),
        held_rows=list(map(Row, result.held_rows)),
        faults=[
            RowFault(
                row=Row(fault.row),
                kind=_short(step_pb2.RowFaultKind, fault.kind, _ROW_FAULT_KIND_PREFIX),
                detail=fault.detail,
            )
            for fault in result.faults
        ],
        queued_seconds=timings.queued.ToNanoseconds() / 1e9,
        executed_seconds=timings.executed.ToNanoseconds() / 1e9,
        digest=result.digest,
    )


def message_to_pb(message: Message) -> model_runner_pb2.ExecuteRequest:
    """A message of the pipeline."""
    match message:
        case StepPlan():
            plan = plan_to_pb(message)
            return model_runner_pb2.ExecuteRequest(
                forward=model_runner_pb2.ForwardRequest(plan=plan)
            )
        case SamplePlan():
            return model_runner_pb2.ExecuteRequest(sample=sample_to_pb(message))
        case _:
            assert_never(message)


def unsendable_rows(message: Message) -> list[Row]:
    """The rows of added sequences that have a number which its field can't hold."""
    rows = []
    for sequence in message.added if isinstance(message, StepPlan) else ():
        try:
            _added_to_pb(sequence)
        except ValueError:
            rows.append(sequence.row)
    return rows


def answer_from_pb(response: model_runner_pb2.ExecuteResponse) -> StepResult:
    """The result in an answer of the pipeline. The core checks that it fits the message."""
    answer = response.sample if response.HasField("sample") else response.forward
    result = result_from_pb(answer.result)
    return replace(result, is_leaving=True) if response.is_leaving else result


def attachment_from_pb(
    attached: model_runner_pb2.AttachResponse, pool: info_pb2.MemoryPool
) -> Attachment:
    """What a claim has brought: the answers to Attach and to GetMemoryPool."""
    info = info_from_pb(attached.worker_info)
    return Attachment(info, pool_from_pb(pool), attached.previous_epoch)


def rendezvous_to_pb(rendezvous: Rendezvous) -> model_runner_pb2.Rendezvous:
    """Where ranks meet."""
    whole, fraction = divmod(round(rendezvous.seconds * 1e9), 10**9)
    return model_runner_pb2.Rendezvous(
        address=rendezvous.address,
        key=rendezvous.key,
        tensor_size=rendezvous.tensor_size,
        pipeline_size=rendezvous.pipeline_size,
        timeout=Duration(seconds=whole, nanos=fraction),
    )


def info_from_pb(info: info_pb2.WorkerInfo) -> WorkerInfo:
    """The part of a worker's capability that the control plane uses."""
    model, limits, ranks = info.model, info.limits, info.ranks
    kind = _short(info_pb2.DeviceKind, info.device.kind, _DEVICE_KIND_PREFIX)
    return WorkerInfo(
        worker_id=info.worker_id,
        incarnation_id=info.incarnation_id,
        epoch=info.epoch,
        model_name=model.name,
        vocabulary_size=model.vocabulary_size,
        weight_version=WeightVersion(
            generation=info.weight_version.generation, digest=info.weight_version.digest
        ),
        max_sequence_count=limits.max_sequence_count,
        max_step_token_count=limits.max_step_token_count,
        max_sequence_token_count=limits.max_sequence_token_count,
        max_prompt_token_count=limits.max_prompt_token_count,
        max_inflight_step_count=limits.max_inflight_step_count,
        features=frozenset(
            _short(info_pb2.Feature, feature, _FEATURE_PREFIX) for feature in info.features
        ),
        rank_count=max(ranks.tensor_size, 1) * max(ranks.pipeline_size, 1),
        device=f"{kind}:{info.device.index} {info.device.name}".rstrip(),
        arithmetic=info.arithmetic,
        ranks=RankCoordinates(
            (ranks.tensor_rank, max(ranks.tensor_size, 1)),
            (ranks.pipeline_rank, max(ranks.pipeline_size, 1)),
            (ranks.data_rank, max(ranks.data_size, 1)),
        ),
        rendezvous_address=info.rendezvous_address,
        adapter_slot_count=info.adapter_slot_count,
        prepared=(
            PreparedUpdate(info.prepared_update.update_id, info.prepared_update.digest)
            if info.HasField("prepared_update")
            else None
        ),
    )


def pool_from_pb(pool: info_pb2.MemoryPool) -> MemoryPool:
    """The part of a worker's KV pool that the control plane uses."""
    return MemoryPool(block_count=pool.block_count, block_size=pool.block_token_count)


def _added_to_pb(sequence: AddedSequence) -> step_pb2.AddedSequence:
    return step_pb2.AddedSequence(
        row=sequence.row,
        token_ids=sequence.token_ids,
        prompt_token_count=sequence.prompt_token_count,
        sampling=sampling_to_pb(sequence.sampling, sequence.seed),
        output=_output_kind_to_pb(sequence.output),
        block_ids=sequence.block_ids,
        computed_token_count=sequence.computed_token_count,
        adapter_slot=sequence.adapter_slot,
        adapter_digest=sequence.adapter_digest,
    )


def sampling_to_pb(sampling: SamplingParams, seed: int) -> types_pb2.SamplingParameters:
    """Copies fields by name."""
    message = default_sampling_to_pb(sampling)
    message.seed = seed
    return message


def default_sampling_to_pb(sampling: SamplingParams) -> types_pb2.SamplingParameters:
    """Copies fields by name; the seed stays unset."""
    values = {name: getattr(sampling, name) for name in _SAMPLING_NAMES}
    return types_pb2.SamplingParameters(**values)


def serving_worker_to_pb(worker: ServingWorker) -> inference_pb2.ServingWorker:
    """A worker as ListModels tells of it."""
    message = inference_pb2.ServingWorker(
        state=f"WORKER_STATE_{worker.state.name}",
        replica_state=f"REPLICA_STATE_{worker.replica_state.name}",
        **{name: getattr(worker, name) for name in _SERVING_WORKER_NAMES},
    )
    if worker.state is WorkerState.AWAY:
        message.away.FromNanoseconds(round(worker.away_seconds * 1e9))
    return message


def _scheduled_to_pb(scheduled: ScheduledRows) -> step_pb2.ScheduledRows:
    counts = scheduled.token_counts
    return step_pb2.ScheduledRows(
        rows=scheduled.rows,
        start_positions=scheduled.start_positions,
        token_counts=None if counts.count(1) == len(counts) else counts,
        source_step_distances=_unless_all_zero(scheduled.source_step_distances),
        literal_token_counts=_unless_all_zero(scheduled.literal_token_counts),
        literal_tokens=scheduled.literal_tokens,
        appended_block_counts=_unless_all_zero(scheduled.appended_block_counts),
        appended_blocks=scheduled.appended_blocks,
        draft_counts=_unless_all_zero(scheduled.draft_counts),
        literal_draft_counts=_unless_all_zero(scheduled.literal_draft_counts),
        literal_drafts=scheduled.literal_drafts,
        open_step_distances=_unless_all_zero(scheduled.open_step_distances),
    )


def _unless_all_zero(column: list[int]) -> list[int] | None:
    return column if any(column) else None


def _output_kind_to_pb(kind: OutputKind) -> step_pb2.OutputKind:
    match kind:
        case OutputKind.SAMPLE:
            return step_pb2.OUTPUT_KIND_SAMPLE
        case OutputKind.HOLD:
            return step_pb2.OUTPUT_KIND_HOLD
        case OutputKind.NONE:
            return step_pb2.OUTPUT_KIND_NONE
        case _:
            assert_never(kind)


def _short(enum: EnumTypeWrapper, number: int, prefix: str) -> str:
    """The value's short name, e.g. cpu for DEVICE_KIND_CPU; its digits where we know no name."""
    value = enum.DESCRIPTOR.values_by_number.get(number)
    return value.name.removeprefix(prefix).lower() if value is not None else str(number)

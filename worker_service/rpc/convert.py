"""Converts messages of the worker's contract to domain values, and back.

Each column becomes an int32 numpy array in one conversion; an omitted column is filled in. What the
message alone shows to be wrong is refused here, with PlanInvalid, which names the field.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import assert_never

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import info_pb2, model_runner_pb2, step_pb2
from worker_service.domain.capability import DataType, DeviceKind, Feature, LayerGroup, MemoryPool
from worker_service.domain.columns import NULL_BLOCK, IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import (
    CONTRACT_VERSION,
    AddedSequence,
    GrammarMasks,
    OutputKind,
    RowFaultKind,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.facade import WorkerInfo

_INT32_MAX = 2**31 - 1


def forward_from_pb(request: model_runner_pb2.ForwardRequest) -> StepPlan:
    """The plan of a request. Raises PlanInvalid. Drops the message's unknown fields."""
    try:
        return _forward_from_pb(request)
    except PlanInvalid as error:
        error.step_id = request.plan.step_id
        raise


def _forward_from_pb(request: model_runner_pb2.ForwardRequest) -> StepPlan:
    _refuse_unknown_fields("forward", request)
    if not request.HasField("plan"):
        raise PlanInvalid("plan", "missing")
    plan = request.plan
    if not plan.HasField("weight_version"):
        raise PlanInvalid("plan.weight_version", "missing")
    return StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        weight_version=WeightVersion(plan.weight_version.generation, plan.weight_version.digest),
        removed_rows=_column("plan.removed_rows", plan.removed_rows),
        added=tuple(
            _added_from_pb(f"plan.added[{index}]", sequence)
            for index, sequence in enumerate(plan.added)
        ),
        scheduled=_scheduled_from_pb(plan.scheduled),
        fingerprint=lambda: _fingerprint(plan),
    )


def sample_from_pb(request: model_runner_pb2.SampleRequest, vocabulary_size: int) -> SamplePlan:
    """The held rows that a request samples. Raises PlanInvalid."""
    try:
        return _sample_from_pb(request, vocabulary_size)
    except PlanInvalid as error:
        error.step_id = request.step_id
        raise


def _sample_from_pb(request: model_runner_pb2.SampleRequest, vocabulary_size: int) -> SamplePlan:
    _refuse_unknown_fields("sample", request)
    rows = _column("rows", request.rows)
    if not rows.size:
        raise PlanInvalid("rows", "missing")
    if np.unique(rows).size != rows.size:
        raise PlanInvalid("rows", "must be distinct")
    masks = _masks_from_pb(request.grammar_masks, vocabulary_size)
    return SamplePlan(request.epoch, request.step_id, rows, masks)


def _masks_from_pb(masks: step_pb2.GrammarMasks, vocabulary_size: int) -> GrammarMasks | None:
    rows = _column("grammar_masks.rows", masks.rows)
    words = -(-vocabulary_size // 32)
    expected = rows.size * words * 4
    if len(masks.bitmasks) != expected:
        raise PlanInvalid(
            "grammar_masks.bitmasks",
            f"{len(masks.bitmasks)} bytes; {rows.size} rows of {words} words are {expected}",
        )
    if not rows.size:
        return None
    bitmasks = np.frombuffer(masks.bitmasks, dtype="<u4").reshape(rows.size, words)
    return GrammarMasks(rows, bitmasks.astype(np.uint32, copy=False))


def result_to_pb(result: StepResult) -> step_pb2.StepResult:
    """A result. The counts are left out when every row has one token."""
    counts = result.token_counts
    return step_pb2.StepResult(
        epoch=result.epoch,
        step_id=result.step_id,
        rows=result.rows.tolist(),
        token_counts=None if (counts == 1).all() else counts.tolist(),
        tokens=result.tokens.tolist(),
        held_rows=result.held_rows.tolist(),
        faults=[
            step_pb2.RowFault(
                row=fault.row, kind=_fault_kind_to_pb(fault.kind), detail=fault.detail
            )
            for fault in result.faults
        ],
        timings=step_pb2.StepTimings(
            queued=duration_to_pb(result.queued_seconds),
            executed=duration_to_pb(result.executed_seconds),
        ),
        digest=result.digest,
    )


def info_to_pb(info: WorkerInfo) -> info_pb2.WorkerInfo:
    """Capability, identity and claim."""
    capability = info.capability
    device, model, limits = capability.device, capability.model, capability.limits
    ranks = capability.ranks
    return info_pb2.WorkerInfo(
        contract_versions=info_pb2.ContractVersionRange(
            minimum=CONTRACT_VERSION, maximum=CONTRACT_VERSION
        ),
        worker_id=info.worker_id,
        incarnation_id=info.incarnation_id,
        epoch=info.epoch,
        device=info_pb2.Device(
            kind=_device_kind_to_pb(device.kind), name=device.name, index=device.index
        ),
        ranks=info_pb2.RankCoordinates(
            tensor_rank=ranks.tensor[0],
            tensor_size=ranks.tensor[1],
            pipeline_rank=ranks.pipeline[0],
            pipeline_size=ranks.pipeline[1],
            data_rank=ranks.data[0],
            data_size=ranks.data[1],
        ),
        model=info_pb2.Model(
            name=model.name,
            architecture=model.architecture,
            vocabulary_size=model.vocabulary_size,
            data_type=_data_type_to_pb(model.data_type),
        ),
        weight_version=version_to_pb(capability.weight_version),
        limits=info_pb2.Limits(
            max_sequence_count=limits.max_sequence_count,
            max_step_token_count=limits.max_step_token_count,
            max_sequence_token_count=limits.max_sequence_token_count,
            max_prompt_token_count=limits.max_prompt_token_count,
            max_inflight_step_count=limits.max_inflight_step_count,
        ),
        adapter_slot_count=capability.adapter_slot_count,
        max_adapter_rank=capability.max_adapter_rank,
        random_seed=capability.random_seed,
        features=sorted(_feature_to_pb(feature) for feature in capability.features),
        attention_backend=capability.attention_backend,
        executor=capability.executor,
        arithmetic=capability.arithmetic,
        rendezvous_address=capability.rendezvous_address,
        prepared_update=(
            None
            if info.prepared is None
            else info_pb2.PreparedUpdate(
                update_id=info.prepared.update_id, digest=info.prepared.digest
            )
        ),
    )


def version_to_pb(version: WeightVersion) -> types_pb2.WeightVersion:
    """Generation and digest."""
    return types_pb2.WeightVersion(generation=version.generation, digest=version.digest)


def pool_to_pb(pool: MemoryPool) -> info_pb2.MemoryPool:
    """Geometry and bytes."""
    return info_pb2.MemoryPool(
        block_count=pool.block_count,
        block_token_count=pool.block_token_count,
        bytes_per_block=pool.bytes_per_block,
        null_block_id=NULL_BLOCK,
        layer_groups=[_layer_group_to_pb(group) for group in pool.layer_groups],
        used_block_count=pool.used_block_count,
        free_block_count=pool.free_block_count,
        memory=info_pb2.DeviceMemory(
            weights_bytes=pool.weights_bytes,
            kv_bytes=pool.kv_bytes,
            workspace_bytes=pool.workspace_bytes,
            free_bytes=pool.free_bytes,
            adapters_bytes=pool.adapters_bytes,
            prepared_bytes=pool.prepared_bytes,
            kept_tensors_bytes=pool.kept_tensors_bytes,
        ),
    )


def _refuse_unknown_fields(path: str, request: Message) -> None:
    """Raises PlanInvalid for fields of a newer contract: they ask for what this worker can't do."""
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise PlanInvalid(path, f"has fields that contract version {CONTRACT_VERSION} lacks")


def _fingerprint(plan: step_pb2.StepPlan) -> bytes:
    return hashlib.blake2b(plan.SerializeToString(deterministic=True), digest_size=16).digest()


def _added_from_pb(path: str, sequence: step_pb2.AddedSequence) -> AddedSequence:
    try:
        return _checked_added(path, sequence)
    except PlanInvalid as error:
        error.rows = (sequence.row,)
        raise


def _checked_added(path: str, sequence: step_pb2.AddedSequence) -> AddedSequence:
    if not sequence.HasField("sampling"):
        raise PlanInvalid(f"{path}.sampling", "missing")
    return AddedSequence(
        row=_int32(f"{path}.row", sequence.row),
        token_ids=_column(f"{path}.token_ids", sequence.token_ids),
        prompt_token_count=_int32(f"{path}.prompt_token_count", sequence.prompt_token_count),
        sampling=_sampling_from_pb(f"{path}.sampling", sequence.sampling),
        output=_output_kind_from_pb(f"{path}.output", sequence.output),
        block_ids=_column(f"{path}.block_ids", sequence.block_ids),
        computed_token_count=_int32(f"{path}.computed_token_count", sequence.computed_token_count),
        adapter_slot=_int32(f"{path}.adapter_slot", sequence.adapter_slot),
        adapter_digest=sequence.adapter_digest,
    )


def _sampling_from_pb(path: str, message: types_pb2.SamplingParameters) -> SamplingParameters:
    """Copies fields by name; an unset field gets the domain's default."""
    given = {field.name: value for field, value in message.ListFields()}
    if "seed" not in given:
        raise PlanInvalid(f"{path}.seed", "must be set towards a worker")
    return SamplingParameters(**given)


def _scheduled_from_pb(scheduled: step_pb2.ScheduledRows) -> ScheduledRows:
    path = "plan.scheduled"
    rows = _column(f"{path}.rows", scheduled.rows)

    def parallel(name: str, values: Sequence[int], omitted: int | None) -> IntColumn:
        if not values and omitted is not None:
            return np.full(rows.size, omitted, dtype=np.int32)
        if len(values) != rows.size:
            raise PlanInvalid(f"{path}.{name}", f"{len(values)} entries for {rows.size} rows")
        return _column(f"{path}.{name}", values)

    def flat(name: str, values: Sequence[int], counts_name: str, counts: IntColumn) -> IntColumn:
        expected = int(counts.sum(dtype=np.int64))
        if len(values) != expected:
            raise PlanInvalid(
                f"{path}.{name}", f"{len(values)} entries; {counts_name} add up to {expected}"
            )
        return _column(f"{path}.{name}", values)

    def about_drafts(name: str, values: Sequence[int]) -> IntColumn:
        return parallel(name, values, None) if values else rows[:0]

    literal_draft_counts = about_drafts("literal_draft_counts", scheduled.literal_draft_counts)
    literal_counts = parallel("literal_token_counts", scheduled.literal_token_counts, 0)
    block_counts = parallel("appended_block_counts", scheduled.appended_block_counts, 0)
    return ScheduledRows(
        rows=rows,
        start_positions=parallel("start_positions", scheduled.start_positions, None),
        token_counts=parallel("token_counts", scheduled.token_counts, 1),
        source_step_distances=parallel("source_step_distances", scheduled.source_step_distances, 0),
        literal_token_counts=literal_counts,
        literal_tokens=flat(
            "literal_tokens", scheduled.literal_tokens, "literal_token_counts", literal_counts
        ),
        appended_block_counts=block_counts,
        appended_blocks=flat(
            "appended_blocks", scheduled.appended_blocks, "appended_block_counts", block_counts
        ),
        draft_counts=about_drafts("draft_counts", scheduled.draft_counts),
        literal_draft_counts=literal_draft_counts,
        literal_drafts=flat(
            "literal_drafts",
            scheduled.literal_drafts,
            "literal_draft_counts",
            literal_draft_counts,
        ),
        open_step_distances=about_drafts("open_step_distances", scheduled.open_step_distances),
    )


def _column(path: str, values: Sequence[int]) -> IntColumn:
    """int32 [n] of a repeated uint32. The slice makes a plain list, which numpy reads fastest."""
    column = np.array(values[:], dtype=np.uint32)
    if column.size and column.max() > _INT32_MAX:
        raise PlanInvalid(path, f"must be at most {_INT32_MAX}")
    return column.view(np.int32)


def _int32(path: str, value: int) -> int:
    if value > _INT32_MAX:
        raise PlanInvalid(path, f"must be at most {_INT32_MAX}")
    return value


def duration_to_pb(seconds: float) -> Duration:
    """A span of seconds."""
    whole, fraction = divmod(round(seconds * 1e9), 10**9)
    return Duration(seconds=whole, nanos=fraction)


def _layer_group_to_pb(group: LayerGroup) -> info_pb2.LayerGroup:
    window = group.window_token_count
    return info_pb2.LayerGroup(
        kind=(
            info_pb2.LAYER_GROUP_KIND_FULL_ATTENTION
            if window is None
            else info_pb2.LAYER_GROUP_KIND_SLIDING_WINDOW
        ),
        layer_indices=group.layer_indices,
        window_token_count=window or 0,
        kv_head_count=group.kv_head_count,
        head_dim=group.head_dim,
        data_type=_data_type_to_pb(group.data_type),
    )


def _output_kind_from_pb(path: str, kind: step_pb2.OutputKind) -> OutputKind:
    match kind:
        case step_pb2.OUTPUT_KIND_SAMPLE:
            return OutputKind.SAMPLE
        case step_pb2.OUTPUT_KIND_HOLD:
            return OutputKind.HOLD
        case step_pb2.OUTPUT_KIND_NONE:
            return OutputKind.NONE
        case _:  # unspecified, or of a newer contract: proto3 enums are open
            raise PlanInvalid(path, f"{kind} is no output kind of this contract")


def _fault_kind_to_pb(kind: RowFaultKind) -> step_pb2.RowFaultKind:
    match kind:
        case RowFaultKind.INVALID_LOGITS:
            return step_pb2.ROW_FAULT_KIND_INVALID_LOGITS
        case RowFaultKind.EMPTY_MASK:
            return step_pb2.ROW_FAULT_KIND_EMPTY_MASK
        case _:
            assert_never(kind)


def _device_kind_to_pb(kind: DeviceKind) -> info_pb2.DeviceKind:
    match kind:
        case DeviceKind.CPU:
            return info_pb2.DEVICE_KIND_CPU
        case DeviceKind.CUDA:
            return info_pb2.DEVICE_KIND_CUDA
        case DeviceKind.SIMULATED:
            return info_pb2.DEVICE_KIND_SIMULATED
        case _:
            assert_never(kind)


def _data_type_to_pb(data_type: DataType) -> info_pb2.DataType:
    match data_type:
        case DataType.FLOAT32:
            return info_pb2.DATA_TYPE_FLOAT32
        case DataType.BFLOAT16:
            return info_pb2.DATA_TYPE_BFLOAT16
        case DataType.FLOAT16:
            return info_pb2.DATA_TYPE_FLOAT16
        case _:
            assert_never(data_type)


def _feature_to_pb(feature: Feature) -> info_pb2.Feature:
    match feature:
        case Feature.HELD_SAMPLING:
            return info_pb2.FEATURE_HELD_SAMPLING
        case Feature.BATCH_INVARIANT:
            return info_pb2.FEATURE_BATCH_INVARIANT
        case Feature.DRAFT_VERIFICATION:
            return info_pb2.FEATURE_DRAFT_VERIFICATION
        case Feature.WEIGHT_UPDATES:
            return info_pb2.FEATURE_WEIGHT_UPDATES
        case Feature.SLEEP:
            return info_pb2.FEATURE_SLEEP
        case _:
            assert_never(feature)

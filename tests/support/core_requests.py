"""Short ways to say what a core test is about."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace

from control_plane.core.config import SchedulerConfig
from control_plane.core.events import SequenceOutput
from control_plane.core.plan import BlockId, Message, Row, StepPlan, StepResult, WeightVersion
from control_plane.core.request import (
    OutputKind,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
    StopScanner,
)
from control_plane.core.scheduler import Scheduler
from control_plane.core.tokens import Tokens

WEIGHTS = WeightVersion(1, "w")


def config(
    *,
    rows: int = 4,
    budget: int = 16,
    longest: int = 32,
    blocks: int = 33,
    block_size: int = 4,
    waiting: int = 16,
    inflight: int = 1,
    caching: bool = True,
    drafts: int = 0,
    stages: int = 1,
) -> SchedulerConfig:
    """Small limits; `blocks` includes the null block."""
    return SchedulerConfig(
        max_sequence_count=rows,
        max_step_token_count=budget,
        max_sequence_token_count=longest,
        block_count=blocks,
        block_size=block_size,
        max_waiting_count=waiting,
        max_inflight_step_count=inflight,
        pipeline_stage_count=stages,
        enable_prefix_caching=caching,
        max_draft_token_count=drafts,
    )


def scheduler_of(limits: SchedulerConfig) -> Scheduler:
    return Scheduler(limits, epoch=7, weight_version=WEIGHTS)


def request(
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 20,
    stops: frozenset[int] = frozenset(),
    ends: frozenset[int] = frozenset(),
    arrival: float = 0.0,
    priority: int = 0,
    salt: str = "",
    output: OutputKind = OutputKind.SAMPLE,
) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=array("I", prompt),
        sampling=SamplingParams(temperature=0.0),
        seed=1,
        stop=StopConditions(max_tokens, stops, ends),
        arrival=arrival,
        priority=priority,
        cache_salt=salt,
        output=output,
    )


def sequence(name: str) -> SequenceId:
    """The sequence of the request of this name: each has one."""
    return SequenceId(int.from_bytes(name.encode(), "big"))


def name_of(output: SequenceOutput) -> str:
    """Whose output it is."""
    length = -(-output.sequence_id.bit_length() // 8)
    return output.sequence_id.to_bytes(length, "big").decode()


def add(scheduler: Scheduler, asked: Request, scanner: StopScanner | None = None) -> None:
    """Queues the request's sequence."""
    scheduler.add(sequence(asked.request_id), asked, scanner)


def planned(scheduler: Scheduler, now: float = 0.0) -> StepPlan:
    """The next plan, where there must be one."""
    plan = scheduler.schedule(now)
    assert plan is not None
    return plan


def result(plan: Message, tokens: Mapping[int, int] | Mapping[Row, int]) -> StepResult:
    """The result of a message: a token for each row, in the order given."""
    return StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=[Row(row) for row in tokens],
        token_counts=[1] * len(tokens),
        tokens=Tokens(list(tokens.values())),
    )


def held_result(plan: StepPlan, tokens: Mapping[int, int], held: list[int]) -> StepResult:
    """The result of a step that holds rows."""
    return replace(result(plan, tokens), held_rows=[Row(row) for row in held])


def several_result(plan: StepPlan, tokens: Mapping[int, list[int]]) -> StepResult:
    """The result of a step whose rows verified drafts: the tokens of each row."""
    return StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        rows=[Row(row) for row in tokens],
        token_counts=[len(ids) for ids in tokens.values()],
        tokens=Tokens([token for ids in tokens.values() for token in ids]),
    )


def table(plan: StepPlan) -> list[tuple[int, int, int, int, list[int], list[BlockId]]]:
    """Per scheduled row: row, start, count, source distance, literal tokens, appended blocks."""
    columns = plan.scheduled
    literals, blocks = iter(columns.literal_tokens), iter(columns.appended_blocks)
    rows = [
        (
            row,
            start,
            count,
            distance,
            [next(literals) for _ in range(literal_count)],
            [next(blocks) for _ in range(block_count)],
        )
        for row, start, count, distance, literal_count, block_count in zip(
            columns.rows,
            columns.start_positions,
            columns.token_counts,
            columns.source_step_distances,
            columns.literal_token_counts,
            columns.appended_block_counts,
            strict=True,
        )
    ]
    assert not list(literals) and not list(blocks)
    return rows

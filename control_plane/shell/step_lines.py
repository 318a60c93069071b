"""What the scheduler does, step by step, as lines at level debug.

Nothing here is called unless somebody reads such lines.
"""

from __future__ import annotations

import logging

from control_plane.core.events import SequenceOutput, Stats
from control_plane.core.plan import StepPlan, StepResult
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)


def log_plan(replica: int, plan: StepPlan, stats: Stats) -> None:
    """A plan is sent. `stats` are the core's behind it; its preemptions are those so far."""
    _logger.debug(
        "step planned",
        extra=fields(
            replica=replica,
            step_id=plan.step_id,
            row_count=len(plan.scheduled.rows),
            token_count=sum(plan.scheduled.token_counts),
            added_count=len(plan.added),
            removed_count=len(plan.removed_rows),
            running=stats.running,
            waiting=stats.waiting,
            preemptions=stats.preemptions,
            kv_free_tokens=stats.kv_free_tokens,
        ),
    )


def log_result(
    replica: int, result: StepResult, outputs: list[SequenceOutput], control_seconds: float
) -> None:
    """A result has come, and was delivered."""
    _logger.debug(
        "step finished",
        extra=fields(
            replica=replica,
            step_id=result.step_id,
            token_count=len(result.tokens),
            ended_count=sum(output.finish is not None for output in outputs),
            fault_count=len(result.faults),
            queued_seconds=round(result.queued_seconds, 6),
            executed_seconds=round(result.executed_seconds, 6),
            control_seconds=round(control_seconds, 6),
        ),
    )

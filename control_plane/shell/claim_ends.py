"""What an error of the worker's means for the claim, for those in flight, and for the log."""

from __future__ import annotations

import logging

from control_plane.core.claim import ClaimEnd, EndKind, Loudness, Verdict
from control_plane.core.errors import ResultMismatch
from control_plane.core.progress import LEAST_SECONDS
from control_plane.core.scheduler import Scheduler
from control_plane.core.suspicion import Accusation, Judgement
from control_plane.shell.ports import (
    RefusalReason,
    WorkerElsewhere,
    WorkerHung,
    WorkerLost,
    WorkerRefused,
    WorkerSilent,
    WorkerUnusable,
)
from twinplane.process.logs import Field, fields

_logger = logging.getLogger(__name__)

ClaimError = WorkerLost | WorkerRefused | WorkerUnusable | ResultMismatch


def end_guilty(
    core: Scheduler, error: ClaimError, max_strikes: int, replica: int, *, has_others: bool
) -> Judgement:
    """Ends the sequences that are surely to blame for a claim's end, and logs their stories.

    `has_others`: other replicas are there.
    """
    accusation = _accusation_of(error)
    judgement = core.accuse(accusation, max_strikes, may_appeal=has_others)
    for output in judgement.convicted:
        _logger.error(
            "request ended: the worker can't execute it",
            extra=fields(
                replica=replica,
                error=str(error),
                step_id=accusation.step_id,
                story="; ".join(core.story(output.sequence_id)),
            ),
        )
    if judgement.worker_is_broken:
        _logger.error(
            "requests given up: the worker fails whoever runs",
            extra=fields(replica=replica, error=str(error)),
        )
    return judgement


def _accusation_of(error: ClaimError) -> Accusation:
    """What an error says about who is to blame. A plan that is invalid is so in any state."""
    if not isinstance(error, WorkerRefused):
        return Accusation(detail=str(error))
    is_certain = error.reason is RefusalReason.INVALID_PLAN
    return Accusation(error.step_id, error.rows, is_certain, str(error))


def end_of(error: ClaimError) -> ClaimEnd:
    """An error of the worker's as the claim takes it."""
    match error:
        case WorkerSilent():
            return ClaimEnd(EndKind.SILENT, str(error), error.seconds)
        case WorkerHung():
            # In a step that may take longer than that, it may have been at work until now.
            return ClaimEnd(EndKind.HUNG, str(error), min(error.seconds, LEAST_SECONDS))
        case WorkerLost():
            return ClaimEnd(EndKind.UNREACHABLE, str(error))
        case WorkerRefused(reason=RefusalReason.STALE_EPOCH):
            return ClaimEnd(EndKind.CONTESTED, error.reason)
        case WorkerRefused(reason=RefusalReason.WORKER_LOADING):
            return ClaimEnd(EndKind.LOADING, error.reason)
        case WorkerRefused(reason=RefusalReason.WORKER_DRAINING):
            return ClaimEnd(EndKind.DRAINING, error.reason)
        case WorkerRefused():
            return ClaimEnd(EndKind.REFUSED, error.reason)
        case WorkerElsewhere():
            return ClaimEnd(EndKind.ELSEWHERE, str(error))
        case WorkerUnusable() | ResultMismatch():
            return ClaimEnd(EndKind.REFUSED, str(error))


def log_end(
    end: ClaimEnd, error: ClaimError, verdict: Verdict, replica: int, sequence_count: int
) -> None:
    details: dict[str, Field] = {
        "replica": replica,
        "error": str(error),
        "retry_seconds": round(verdict.retry_after, 3),
        "sequence_count": sequence_count,
    }
    if isinstance(error, ResultMismatch):
        details["story"] = "; ".join(error.story)
    match end.kind:
        case EndKind.CONTESTED:
            message = "another controller claimed the worker"
        case EndKind.LOADING:  # as every worker does that starts: nothing is amiss
            message = "the worker loads its model"
        case _:
            message = "no worker"
    _logger.log(
        logging.WARNING if verdict.loudness is Loudness.WARNING else logging.INFO,
        message,
        extra=fields(**details),
    )

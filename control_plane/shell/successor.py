"""A worker that comes back other than it was: what its difference means for what was running."""

from __future__ import annotations

import logging
from enum import StrEnum

from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import RequestTooLong
from control_plane.core.request import SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import Obstacle, Successor
from control_plane.shell.engine import EngineError, VocabularyMismatch
from control_plane.shell.ports import HELD_SAMPLING, WorkerInfo
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

FailureKind = type[EngineError] | type[RequestTooLong]

FAILURES: dict[Obstacle, FailureKind] = {
    Obstacle.PROMPT_LENGTH: RequestTooLong,
    Obstacle.VOCABULARY: VocabularyMismatch,
}
"""What sending the request again can't mend; the other obstacles are EngineLost."""


class ArithmeticChange(StrEnum):
    """What becomes of generations that have tokens when the worker's arithmetic changes."""

    END = "end"
    """They end with an error: no client gets tokens of two minds."""
    CONTINUE = "continue"
    """They go on, and their ends tell of it."""


def successor_of(
    config: SchedulerConfig, info: WorkerInfo, before: WorkerInfo, on_change: ArithmeticChange
) -> Successor:
    """How the worker `info` differs from `before`. `config` are the limits with it."""
    if info.arithmetic != before.arithmetic:
        _logger.warning(
            "the worker came back with other arithmetic",
            extra=fields(
                before=before.arithmetic, now=info.arithmetic, arithmetic_change=on_change
            ),
        )
    ends_mid_stream: Obstacle | None = None
    same_vocabulary = info.vocabulary_size == before.vocabulary_size
    if info.weight_version.digest != before.weight_version.digest or not same_vocabulary:
        ends_mid_stream = Obstacle.WEIGHTS
    elif info.arithmetic != before.arithmetic and on_change is ArithmeticChange.END:
        ends_mid_stream = Obstacle.ARITHMETIC
    shrank = info.vocabulary_size < before.vocabulary_size
    return Successor(
        max_sequence_token_count=config.max_sequence_token_count,
        vocabulary_size=info.vocabulary_size if shrank else None,
        holds_rows=HELD_SAMPLING in info.features,
        ends_mid_stream=ends_mid_stream,
    )


def unfit(
    core: Scheduler, successor: Successor, replica: int
) -> list[tuple[Obstacle, set[SequenceId]]]:
    """The sequences that can't go on with the successor, by what is in their way."""
    found = core.obstacles(successor)
    groups = []
    for obstacle in Obstacle:
        if ids := {name for name, own in found.items() if own is obstacle}:
            _logger.error(
                "requests ended: the worker can't go on with them",
                extra=fields(replica=replica, error=obstacle.value, sequence_count=len(ids)),
            )
            groups.append((obstacle, ids))
    return groups

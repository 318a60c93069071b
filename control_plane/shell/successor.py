"""A worker that comes back other than it was: what its difference means for what was running."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import RequestTooLong
from control_plane.core.request import Origin, Request, SequenceId
from control_plane.core.succession import Obstacle, Traits
from control_plane.shell.engine import (
    AdapterUnavailable,
    CannotResume,
    EngineError,
    EngineLost,
    ServedModel,
    VocabularyMismatch,
    WeightsChanged,
)
from control_plane.shell.ports import HELD_SAMPLING, WorkerInfo
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

FailureKind = type[EngineError] | type[RequestTooLong]


def failure_of(obstacle: Obstacle, *, is_decided: bool) -> FailureKind:
    """How a sequence fails over an obstacle. `is_decided`: an operator chooses the weights."""
    match obstacle:
        case Obstacle.PROMPT_LENGTH:
            return RequestTooLong
        case Obstacle.VOCABULARY:
            return VocabularyMismatch
        case Obstacle.ADAPTER:
            return AdapterUnavailable
        case Obstacle.WEIGHTS if is_decided:
            return WeightsChanged
        case _:
            return EngineLost


class ArithmeticChange(StrEnum):
    """What becomes of generations that have tokens when the worker's arithmetic changes."""

    END = "end"
    """They end with an error: no client gets tokens of two minds."""
    CONTINUE = "continue"
    """They go on, and their ends tell of it."""


def traits_of(config: SchedulerConfig, info: WorkerInfo) -> Traits:
    """What of a worker its sequences can notice. `config` are the limits with it."""
    return Traits(
        weight_digest=info.weight_version.digest,
        arithmetic=info.arithmetic,
        vocabulary_size=info.vocabulary_size,
        max_sequence_token_count=config.max_sequence_token_count,
        holds_rows=HELD_SAMPLING in info.features,
        takes_adapters=config.adapter_slot_count > 0,
    )


def tell_arithmetic(before: WorkerInfo, info: WorkerInfo, on_change: ArithmeticChange) -> bool:
    """Whether sequences with tokens may go on though the arithmetic changed. Logs a change."""
    if info.arithmetic != before.arithmetic:
        _logger.warning(
            "the worker came back with other arithmetic",
            extra=fields(
                before=before.arithmetic, now=info.arithmetic, arithmetic_change=on_change
            ),
        )
    return on_change is ArithmeticChange.CONTINUE


def model_of(config: SchedulerConfig, info: WorkerInfo) -> ServedModel:
    """What a worker serves. `config` are the limits with it."""
    return ServedModel(
        name=info.model_name,
        max_sequence_token_count=config.max_sequence_token_count,
        vocabulary_size=info.vocabulary_size,
        weight_version=info.weight_version,
    )


def resumable(
    request: Request, origin: Origin | None, on_change: ArithmeticChange, *, continues: bool
) -> Request:
    """A request as it goes on with a worker of `origin`, behind what it has generated elsewhere.

    `continues`: it may with other weights. Raises CannotResume where its tokens would be of two
    minds.
    """
    resumed = request.resumed
    if resumed is None or resumed.origin is None:
        return request
    before = resumed.origin
    assert origin is not None
    differs = []
    if before.weights_digest != origin.weights_digest and not continues:
        differs.append("weights")
    if before.arithmetic != origin.arithmetic and on_change is ArithmeticChange.END:
        differs.append("arithmetic")
    if differs:
        raise CannotResume(*differs)
    goes_on = replace(resumed, origin=before.followed_by(origin), spans=resumed.made_by())
    return replace(request, resumed=goes_on)


def unfit(
    found: Mapping[SequenceId, Obstacle], replica: int
) -> list[tuple[Obstacle, set[SequenceId]]]:
    """The sequences that can't go on with the worker that came, by what is in their way."""
    groups = []
    for obstacle in Obstacle:
        if ids := {name for name, own in found.items() if own is obstacle}:
            _logger.error(
                "requests ended: the worker can't go on with them",
                extra=fields(replica=replica, error=obstacle.value, sequence_count=len(ids)),
            )
            groups.append((obstacle, ids))
    return groups

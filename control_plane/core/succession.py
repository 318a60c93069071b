"""Which sequences can't go on with another worker than they were with, and why.

The other worker is the one that comes back to a replica, or that of another replica. Everything
else goes on: fewer rows, blocks or tokens a step, or blocks of another size, only change how it is
scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from control_plane.core.ledger import Ledger
from control_plane.core.request import SequenceId
from control_plane.core.sequence import Sequence


class Obstacle(Enum):
    """Why a sequence can't go on; the value says it to clients."""

    WEIGHTS = "the worker came back with other weights"
    ARITHMETIC = "the worker came back with other arithmetic: its tokens would not fit those before"
    VOCABULARY = "the worker came back with a smaller vocabulary than this request needs"
    HOLD = "the worker came back without held rows, which this request needs"
    PROMPT_LENGTH = "the worker came back with too short a length for this prompt"
    ADAPTER = "the worker came back without room for adapters, of which this request needs one"
    LENGTH = "the worker came back with a shorter length than this sequence has already"


@dataclass(frozen=True, slots=True)
class Traits:
    """What of a worker a sequence can notice.

    `max_sequence_token_count` as in SchedulerConfig. Equal weights and equal `arithmetic` make
    equal tokens. `takes_over`: whoever has tokens of other weights may go on here.
    `takes_adapters`: it has slots for adapters.
    """

    weight_digest: str
    arithmetic: str
    vocabulary_size: int
    max_sequence_token_count: int
    holds_rows: bool = True
    takes_over: bool = False
    takes_adapters: bool = True


def obstacles(
    ledger: Ledger, before: Traits, after: Traits, *, may_cross: bool
) -> dict[SequenceId, Obstacle]:
    """The live sequences that can't go on with the worker that comes `after`."""
    found = {}
    for name, sequence in ledger.sequences.items():
        obstacle = obstacle_of(sequence, before, after, may_cross=may_cross)
        if obstacle is not None:
            found[name] = obstacle
    return found


def obstacle_of(
    sequence: Sequence, before: Traits, after: Traits, *, may_cross: bool
) -> Obstacle | None:
    """Why a sequence can't go from one worker to another; None: it can.

    `may_cross`: with tokens of its own it may go on with a worker that rounds otherwise.
    """
    begun = sequence.completion_count > 0
    same_vocabulary = after.vocabulary_size == before.vocabulary_size
    same_weights = after.weight_digest == before.weight_digest or after.takes_over
    if begun and not (same_weights and same_vocabulary):
        return Obstacle.WEIGHTS
    if begun and after.arithmetic != before.arithmetic and not may_cross:
        return Obstacle.ARITHMETIC
    if sequence.holds and not after.holds_rows:
        return Obstacle.HOLD
    if sequence.request.adapter is not None and not after.takes_adapters:
        return Obstacle.ADAPTER
    length = after.max_sequence_token_count
    if begun and len(sequence.token_ids) > length:
        return Obstacle.LENGTH
    if not begun and len(sequence.token_ids) >= length:
        return Obstacle.PROMPT_LENGTH
    if after.vocabulary_size < before.vocabulary_size and (
        max(sequence.token_ids) >= after.vocabulary_size
    ):
        return Obstacle.VOCABULARY
    return None

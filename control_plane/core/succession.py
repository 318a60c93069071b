"""Which sequences can't go on when a worker comes back other than it was, and why.

Everything else goes on: fewer rows, blocks or tokens a step, or blocks of another size, only change
how it is scheduled.
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
    LENGTH = "the worker came back with a shorter length than this sequence has already"


@dataclass(frozen=True, slots=True)
class Successor:
    """The worker that comes, beside the one that was.

    `max_sequence_token_count` as in SchedulerConfig. `vocabulary_size` is None where the vocabulary
    did not shrink. `ends_mid_stream`: nothing that has tokens may go on, for this reason.
    """

    max_sequence_token_count: int
    vocabulary_size: int | None = None
    holds_rows: bool = True
    ends_mid_stream: Obstacle | None = None


def obstacles(ledger: Ledger, successor: Successor) -> dict[SequenceId, Obstacle]:
    """The live sequences that can't go on with the successor."""
    found = {}
    for name, sequence in ledger.sequences.items():
        obstacle = _obstacle(sequence, successor)
        if obstacle is not None:
            found[name] = obstacle
    return found


def _obstacle(sequence: Sequence, successor: Successor) -> Obstacle | None:
    begun = sequence.completion_count > 0
    if begun and successor.ends_mid_stream is not None:
        return successor.ends_mid_stream
    if sequence.holds and not successor.holds_rows:
        return Obstacle.HOLD
    length = successor.max_sequence_token_count
    if begun and len(sequence.token_ids) > length:
        return Obstacle.LENGTH
    if not begun and len(sequence.token_ids) >= length:
        return Obstacle.PROMPT_LENGTH
    size = successor.vocabulary_size
    if size is not None and max(sequence.token_ids) >= size:
        return Obstacle.VOCABULARY
    return None

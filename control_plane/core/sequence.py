"""One token stream and where it stands. Mutable, owned by the ledger; no policy here.

How far a sequence is, in tokens:

    token_ids        known to the control plane: the prompt and what results have brought
    pending          sampled by steps still in flight, not known yet
    computed         with KV once every plan made so far has run; runs ahead of the results

A step computes positions [computed, computed + n). Where that reaches the end of token_ids plus
pending, the step samples one token more.

Only the methods below move these counters. The scheduler's loop over decoding rows and that over
their results do the same inline, because they run for every row in every step; invariants.py holds
all of them to one rule.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from control_plane.core.plan import BlockId, Row
from control_plane.core.request import Request, SequenceId, StopScanner

Rank = tuple[float, float, int]
NO_ROW = Row(-1)


class SequenceState(Enum):
    """A sequence's life: it may go between the first two any number of times."""

    WAITING = 1
    RUNNING = 2
    OVER = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """A token stream. `rank` orders sequences: the smallest goes first and is preempted last."""

    sequence_id: SequenceId
    request: Request
    """Without its prompt, which the log holds."""
    prompt_count: int
    scanner: StopScanner | None
    rank: Rank
    token_ids: array[int]
    """Typecode I: four bytes a token, nothing for the garbage collector to walk, and a block of it
    is its own packing for the hash."""
    token_limit: int
    """Total tokens at which it ends, prompt included."""
    cache_root: bytes
    """What the block hashes of this request's cache salt chain from."""
    stop_ids: frozenset[int]

    state: SequenceState = SequenceState.WAITING
    row: Row = NO_ROW
    blocks: list[BlockId] = field(default_factory=list)
    capacity: int = 0
    """Tokens that `blocks` hold."""
    computed: int = 0
    caught_up: bool = False
    """Only the token sampled last is left to compute: the worker's row holds all before it, and
    that one enters the row by its source step or literally."""
    pending: int = 0
    last_step: int = 0
    """The last step that computes tokens of it; while it has caught up, the last that samples."""

    block_hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as anybody asked."""
    registered: int = 0
    """Leading `blocks` that were hits or were offered to the prefix cache."""
    furthest: int = 0
    """The most tokens that ever were computed or cached: what lies below is recomputation."""
    cached_prompt_count: int | None = None
    """Prompt tokens found in the prefix cache when first scheduled; None before."""

    @property
    def completion_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    def started(self, row: Row, hits: list[BlockId], hit_count: int) -> None:
        """It has a row, and its first `hit_count` tokens in blocks of the prefix cache."""
        self.state = SequenceState.RUNNING
        self.row = row
        self.blocks = hits
        self.capacity = self.computed = hit_count
        self.registered = len(hits)
        if self.cached_prompt_count is None:
            self.cached_prompt_count = min(hit_count, self.prompt_count)
        self.furthest = max(self.furthest, hit_count)

    def planned(self, step_id: int, end: int) -> None:
        """A plan computes known tokens up to position `end`, exclusive."""
        self.computed = end
        self.last_step = step_id

    def sampled(self) -> None:
        """The plan that computes its last token also samples the next one."""
        self.caught_up = True
        self.pending += 1

    def confirmed(self, token_ids: list[int]) -> None:
        """A result has brought what a step sampled."""
        self.pending -= 1
        self.token_ids.extend(token_ids)

    def vacated(self, state: SequenceState) -> None:
        """Its row and its blocks are gone; tokens in flight may still come."""
        self.state = state
        self.furthest = max(self.furthest, self.computed)
        self.row = NO_ROW
        self.blocks = []
        self.capacity = self.computed = 0
        self.caught_up = False

    def lost(self) -> None:
        """What was in flight will never come."""
        self.pending = self.last_step = 0


def rank_of(request: Request, serial: int, ageing_seconds: float) -> Rank:
    """Smaller goes first: by priority lowered by the time waited, then arrival, then `serial`.

    The effective priority at `now` is priority - (now - arrival) / ageing_seconds. All fall at one
    pace, so their order never changes and `now` drops out of it: the order is a constant of each
    request. Nothing starves, because whoever comes late enough ranks behind, whatever its priority.
    """
    return (request.priority + request.arrival / ageing_seconds, request.arrival, serial)

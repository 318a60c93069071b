"""One token stream and where it stands. Mutable, owned by the ledger; no policy here.

How far a sequence is, in tokens:

    token_ids        known to the control plane: the prompt and what results have brought
    pending          sampled by steps still in flight, not known yet
    computed         with KV once every plan made so far has run; runs ahead of the results

A step computes positions [computed, computed + n). Where that reaches the end of token_ids plus
pending, the step samples one token more.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum

from control_plane.core.plan import BlockId, Row
from control_plane.core.request import Request

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

    request: Request
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
    sampled_step: int = 0
    """The last step that sampled for it."""

    block_hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as anybody asked."""
    registered: int = 0
    """Leading `blocks` that were hits or were offered to the prefix cache."""
    furthest: int = 0
    """The most tokens that ever were computed or cached: what lies below is recomputation."""
    cached_prompt_count: int | None = None
    """Prompt tokens found in the prefix cache when first scheduled; None before."""

    @property
    def prompt_count(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def completion_count(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def last_position(self) -> int:
        """The position of its very last token, which nothing follows and nobody computes."""
        return self.token_limit - 1


def rank_of(request: Request, serial: int, ageing_seconds: float) -> Rank:
    """Smaller goes first: by priority lowered by the time waited, then arrival, then `serial`.

    The effective priority at `now` is priority - (now - arrival) / ageing_seconds. All fall at one
    pace, so their order never changes and `now` drops out of it: the order is a constant of each
    request. Nothing starves, because whoever comes late enough ranks behind, whatever its priority.
    """
    return (request.priority + request.arrival / ageing_seconds, request.arrival, serial)

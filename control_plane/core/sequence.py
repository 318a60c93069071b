"""One token stream and where it stands. Mutable, owned by the ledger; no policy here.

How far a sequence is, in tokens:

    token_ids        known to the control plane: the prompt and what results have brought
    pending          steps in flight, each of which brings one token or more
    computed         surely has KV once every plan made so far has run; runs ahead of the results
    ahead            drafts of steps in flight: if all are accepted, computed + ahead have KV

A step computes positions [computed, computed + n). Where that reaches the end of token_ids plus
pending, the step samples one token more. A step that verifies d drafts computes d positions more;
its result brings 1 to d + 1 tokens, and `computed` grows by the accepted drafts only then.

Only the methods below move these counters. The scheduler's loop over decoding rows and that over
their results do the same inline, because they run for every row in every step; invariants.py holds
all of them to one rule.
"""

from __future__ import annotations

from array import array
from copy import copy
from dataclasses import dataclass, field
from enum import Enum

from control_plane.core.plan import AddedSequence, BlockId, Row, WeightVersion
from control_plane.core.request import OutputKind, Request, SequenceId, StopScanner
from control_plane.core.spans import Spans, WeightsSpan, extended, token_count

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
    watched: bool = False
    """Each of its tokens needs more than a look at `stop_ids` and the limit."""

    state: SequenceState = SequenceState.WAITING
    row: Row = NO_ROW
    last_step: int = 0
    """The last step that computes tokens of it; while it has caught up, the last that samples."""
    blocks: list[BlockId] = field(default_factory=list)
    capacity: int = 0
    """Tokens that `blocks` hold."""
    computed: int = 0
    ahead: int = 0
    pending: int = 0
    caught_up: bool = False
    """Only the token sampled last is left to compute: the worker's row holds all before it, and
    that one enters the row by its source step or literally."""
    steady: bool = False
    """It has caught up, and goes on by one token a step without drafts or holds."""
    held: bool = False
    """The worker holds its logits. It can't go on before a SamplePlan names it."""
    mask: bytes | None = None
    """Which tokens may come next, told and not yet sent; empty: any. None: nobody told yet."""
    sent_mask: bytes | None = None
    """The mask of a SamplePlan whose token has not come yet."""

    block_hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks, as far as anybody asked."""
    missing: int = 0
    """Tokens that were not in the prefix cache when it began to wait. Constant while it waits."""
    registered: int = 0
    """Leading `blocks` that were hits or were offered to the prefix cache."""
    furthest: int = 0
    """The most tokens that ever were computed or cached: what lies below is recomputation."""
    strikes: int = 0
    """Claims in a row that ended while it was in flight and had made no progress: suspicion.py."""
    struck_elsewhere: bool = False
    """It got some of its strikes at another replica."""
    appeals: bool = False
    """It has had its trials where it is: the next one should be at another replica."""
    strike_mark: int = -1
    """How far it had come at the last strike, see `reached`."""
    arithmetic_changed: bool = False
    """A worker that rounds otherwise went on with it, behind tokens of another."""
    cached_prompt_count: int | None = None
    """Prompt tokens found in the prefix cache when first scheduled; None before."""
    started_at: float | None = None
    """When it was first scheduled; None before."""
    spans: Spans = ()
    """Which weights made its tokens, as far as that was noted; the others are of those now."""
    adapter_slot: int = 0
    """Where its adapter is while it runs; 0: it has none, or waits."""
    awaits_adapter: bool = False
    """It waits for its adapter to get a slot, not for a row; see adapters.py."""
    keeps_kv: bool = False
    """Other weights than those now have made some of its KV: no other sequence may share that."""

    @property
    def completion_count(self) -> int:
        return len(self.token_ids) - self.prompt_count

    @property
    def adapter_digest(self) -> str:
        """Of the adapter that computes it; empty: the model alone does."""
        adapter = self.request.adapter
        return "" if adapter is None else adapter.digest

    @property
    def reached(self) -> int:
        """Tokens up to which it is known that a worker can execute it. Nothing is in flight."""
        return len(self.token_ids) if self.caught_up else self.computed

    @property
    def holds(self) -> bool:
        """Whether its tokens are constrained, so that each is sampled by a SamplePlan."""
        return self.request.output is OutputKind.HOLD

    def started(self, row: Row, hits: list[BlockId], hit_count: int) -> None:
        """It has a row, and its first `hit_count` tokens in blocks of the prefix cache."""
        self.state = SequenceState.RUNNING
        self.row = row
        self.blocks = hits
        self.capacity = self.computed = hit_count
        self.registered = len(hits)
        if self.cached_prompt_count is None:
            self.cached_prompt_count = min(hit_count, self.prompt_count)

    def added(self, hits: list[BlockId]) -> AddedSequence:
        """As it enters the worker's batch, with these blocks."""
        return AddedSequence(
            row=self.row,
            token_ids=self.token_ids[:],
            prompt_token_count=self.prompt_count,
            sampling=self.request.sampling,
            seed=self.request.seed,
            output=self.request.output,
            block_ids=list(hits),
            computed_token_count=self.computed,
            adapter_slot=self.adapter_slot,
            adapter_digest=self.adapter_digest,
        )

    def grown(self, blocks: list[BlockId], token_count: int) -> None:
        """It has more blocks, for so many tokens."""
        self.blocks += blocks
        self.capacity += token_count

    def planned(self, step_id: int, end: int) -> None:
        """A plan computes its tokens up to position `end`, exclusive. Drafts are not counted."""
        self.computed = end
        self.last_step = step_id

    def reached_end(self, *, steady: bool, draft_count: int = 0) -> None:
        """The plan computes its last token, and so many drafts behind it.

        The result will bring its next tokens. If the sequence holds, it is held from now on, and
        the result of a SamplePlan will bring the token.
        """
        self.caught_up = True
        self.held = self.holds
        self.steady = steady and not self.held
        self.pending += 1
        self.ahead += draft_count

    def released(self) -> None:
        """A SamplePlan samples what was held."""
        assert self.held and self.mask is not None
        self.held = False
        self.sent_mask, self.mask = self.mask, None

    def confirmed(self, token_ids: list[int], draft_count: int = 0) -> None:
        """A result has brought what a step sampled, which verified so many drafts."""
        self.pending -= 1
        self.token_ids.extend(token_ids)
        self.sent_mask = None
        if self.state is SequenceState.RUNNING:  # in the row of that step: see Ledger.start
            self.computed += len(token_ids) - 1
            self.ahead -= draft_count

    def vacated(self, state: SequenceState) -> None:
        """Its row and its blocks are gone. Tokens in flight may still come, but no held one."""
        self.state = state
        self.furthest = max(self.furthest, self.computed)
        self.row = NO_ROW
        self.blocks = []
        self.capacity = self.computed = self.ahead = 0
        self.pending -= self.held
        self.caught_up = self.steady = self.held = False

    def rewound(self) -> None:
        """Steps in flight count for nothing.

        A generated token is known because the step that computed all before it has been answered;
        its own KV is the next step's work. As long as a prompt is being computed, each step's full
        blocks are registered with it: what lies below `registered` is the cache's to judge.
        """
        self.furthest = max(self.furthest, self.computed)
        self.computed = min(self.computed, len(self.token_ids) - 1)
        self.ahead = self.last_step = 0

    def credited(self, version: WeightVersion) -> None:
        """Notes that its tokens since the last note were made by these weights."""
        count = self.completion_count - token_count(self.spans)
        span = WeightsSpan(count, version.digest, version.name, self.keeps_kv)
        self.spans = extended(self.spans, span)

    def departed(self) -> Sequence:
        """A copy that waits, for another core. What is in flight finds this one over."""
        copied = copy(self)
        copied.vacated(SequenceState.WAITING)
        copied.lost()
        copied.block_hashes = []
        copied.adapter_slot, copied.awaits_adapter = 0, False
        self.state = SequenceState.OVER
        return copied

    def lost(self) -> None:
        """What was in flight will never come; what was allowed still is."""
        self.pending = self.last_step = 0
        if self.sent_mask is not None:
            self.mask, self.sent_mask = self.sent_mask, None


def rank_of(request: Request, sequence_id: SequenceId, ageing_seconds: float) -> Rank:
    """Smaller goes first: by priority lowered by the time waited, then arrival, then its number.

    The effective priority at `now` is priority - (now - arrival) / ageing_seconds. All fall at one
    pace, so their order never changes and `now` drops out of it: the order is a constant of each
    request. Nothing starves, because whoever comes late enough ranks behind, whatever its priority.
    """
    return (request.priority + request.arrival / ageing_seconds, request.arrival, sequence_id)

"""What the core tells the shell: tokens, ends, and what it has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from control_plane.core.request import SequenceId
from control_plane.core.spans import Spans
from control_plane.core.tokens import Tokens

_MOST_LABELS = 8
"""Of weights that were exchanged: each is a series of metrics."""


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    """Its client's deadline passed."""
    FAULT = "fault"
    WEIGHTS_CHANGED = "weights_changed"
    """Other weights came, and the operator chose to end what had begun with the old ones."""
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    """Its adapter could not be loaded."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a sequence cost. Cached ones were in the prefix cache when it was first scheduled."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a sequence. `stop_token_id` is set when one of its own stop tokens ended it.

    `arithmetic_changed`: it went on with a worker that rounds otherwise than the one before.
    `started_at`: when it was first scheduled, on the clock of `Request.arrival`; None: never.
    `spans`: which weights made its tokens, all of them.
    """

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    detail: str = ""
    arithmetic_changed: bool = False
    started_at: float | None = None
    spans: Spans = ()


@dataclass(slots=True)
class SequenceOutput:
    """New tokens of one sequence, and its end if this was it. Both empty never happens.

    A value, and not frozen only for what that costs: every row of every step makes one.
    """

    sequence_id: SequenceId
    tokens: Tokens
    finish: Finish | None = None


@dataclass(slots=True, eq=False)
class Counters:
    """Only ever grow; a resync does not reset them."""

    submitted: int = 0
    moved_in: int = 0
    moved_out: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    adapter_hits: int = 0
    adapter_waits: int = 0
    adapter_loads: int = 0
    adapter_failures: int = 0
    adapter_evictions: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    generated_before: dict[str, int] = field(default_factory=dict)
    """Tokens of weights that were exchanged since, by their label, the last of them."""
    generated_at_exchange: int = 0
    """`generated_tokens` at the last exchange."""

    def credit(self, label: str) -> None:
        """The tokens since the last exchange are those of weights of this label."""
        count = self.generated_before.pop(label, 0)
        count += self.generated_tokens - self.generated_at_exchange
        self.generated_before[label] = count
        self.generated_at_exchange = self.generated_tokens
        if len(self.generated_before) > _MOST_LABELS:
            del self.generated_before[next(iter(self.generated_before))]

    def generated_by(self, label: str) -> dict[str, int]:
        """Tokens by the label of their weights; those now have this one."""
        since = self.generated_tokens - self.generated_at_exchange
        before = self.generated_before.get(label, 0)
        return {**self.generated_before, label: before + since}

    @property
    def computed_tokens(self) -> int:
        """All that the worker was given to compute, roughly: a row's last token is never."""
        return self.prompt_tokens + self.recomputed_tokens + self.generated_tokens


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. Sequences and steps are counts of now; the rest below grows monotonically.

    The KV tokens are slots of the pool by state and add up to it: `kv_active_tokens` in blocks
    that running sequences hold, `kv_cached_tokens` in blocks that only the prefix cache keeps,
    `kv_free_tokens` in blank blocks. Sequences come by being `submitted` or `moved_in` from another
    core, and go by being `finished` or `moved_out`. A prompt token counts once, as computed
    (`prompt_tokens`) or as found in the cache (`cached_prompt_tokens`); computed again after a
    preemption, a move or the loss of a worker it is one of `recomputed_tokens`, as is a generated
    token. `generated_tokens` are those that were handed out. Output that a resumed request
    brings is none of these.

    A sequence with an adapter that comes finds it in a slot (`adapter_hits`) or waits for it
    (`adapter_waits`). `adapters_waiting` of those that are `waiting` wait for one now. An eviction
    is a load in place of another adapter.
    """

    running: int
    waiting: int
    inflight: int
    kv_active_tokens: int
    kv_cached_tokens: int
    kv_free_tokens: int
    submitted: int
    moved_in: int
    moved_out: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    finished: Mapping[FinishReason, int]
    generated_by_weights: Mapping[str, int] = field(default_factory=dict)
    """`generated_tokens` by the weights that made them: their name, or the start of their digest.
    Only the last few weights are remembered."""
    adapters_waiting: int = 0
    adapter_hits: int = 0
    adapter_waits: int = 0
    adapter_loads: int = 0
    adapter_failures: int = 0
    adapter_evictions: int = 0

    def without_worker(self) -> Stats:
        """What of it holds while the worker is lost: it has no KV, and nothing is in flight."""
        return replace(self, inflight=0, kv_active_tokens=0, kv_cached_tokens=0, kv_free_tokens=0)

"""What a client asks, after validation and tokenization: constant from then on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NewType, Protocol

from control_plane.core.spans import Spans, WeightsSpan, extended

RequestId = NewType("RequestId", str)
SequenceId = NewType("SequenceId", int)
"""One token stream of a request. The core knows sequences only; whoever adds one names it, and
never uses a name twice. Later sequences have larger numbers."""


class OutputKind(Enum):
    """What becomes of the logits at the end of a sequence's tokens."""

    SAMPLE = 1
    """The step that reaches the end samples the next token."""
    HOLD = 2
    """The row is held until it is known which tokens are allowed; see Scheduler.sample."""
    NONE = 3
    """Only the KV is computed."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved: every field has a value. Temperature 0 is greedy, top_k 0 keeps all.

    The fields are the proto's SamplingParameters by name, but for the seed, which each sequence has
    of its own. Validation and conversion go by these names and defaults; twinplane.bounds has the
    ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


CONTRACT_DEFAULTS = SamplingParams()
"""What holds where neither the request nor the model says anything: all tokens, as predicted."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """`max_tokens` is resolved against the model's length. For stop strings see StopScanner."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    end_of_sequence_ids: frozenset[int] = frozenset()
    """Empty when the request ignores the end of sequence."""


class StopScanner(Protocol):
    """Looks for stop strings in one sequence's text. The core knows no text: it asks."""

    def push(self, token_ids: list[int]) -> int | None:
        """How many of these tokens count, because a stop string is complete; None: go on.

        Is called with all of a sequence's tokens in order, those of one step at a time, and never
        again after a count.
        """
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What the last of some tokens were made with. `arithmetic` names how their worker rounds, see
    WorkerInfo; `arithmetic_changed`: some were made with another one. `weights_name` and
    `kv_of_other_weights` as in WeightsSpan.
    """

    weights_digest: str
    arithmetic: str
    arithmetic_changed: bool = False
    weights_name: str = ""
    kv_of_other_weights: bool = False

    def followed_by(self, origin: Origin) -> Origin:
        """That of all tokens, when those of `origin` come behind these."""
        changed = self.arithmetic_changed or origin.arithmetic != self.arithmetic
        return replace(origin, arithmetic_changed=changed)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a request had generated before its client sent it again; none of it is an end."""

    token_ids: Sequence[int]
    """Best an array of typecode I."""
    origin: Origin | None = None
    """None: the client vouches for it."""
    spans: Spans = ()
    """Of all the tokens, or empty: then the origin is that of all of them."""

    def made_by(self) -> Spans:
        """Which weights made which of the tokens, as far as that is known."""
        if self.spans:
            return self.spans
        origin = self.origin or Origin("", "")
        span = WeightsSpan(
            len(self.token_ids),
            origin.weights_digest,
            origin.weights_name,
            origin.kv_of_other_weights,
        )
        return extended((), span)


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA weights beside the model's own. `digest` is what they are: hex SHA-256 of their content;
    `name` is what clients call them."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `arrival` is the injected clock's seconds; smaller `priority` runs earlier."""

    request_id: RequestId
    prompt_token_ids: Sequence[int]
    """Best an array of typecode I: four bytes a token."""
    sampling: SamplingParams
    seed: int
    stop: StopConditions
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    output: OutputKind = OutputKind.SAMPLE
    resumed: Resumed | None = None
    """None: nothing of it was generated yet."""
    adapter: Adapter | None = None
    """What computes its tokens beside the model; None: the model alone."""

"""How a request's tokens are drawn and when they end: validated at the edge, then constant."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved: every field has a value. Temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class StopConditions:
    """`max_tokens` is resolved against the model's length. Stop strings are the text layer's."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    end_of_sequence_ids: frozenset[int] = frozenset()
    """Empty when the request ignores the end of sequence."""

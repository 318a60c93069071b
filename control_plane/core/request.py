"""What a client asks, after validation and tokenization: constant from then on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)


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


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `arrival` is the injected clock's seconds; smaller `priority` runs earlier."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop: StopConditions
    arrival: float
    priority: int = 0
    cache_salt: str = ""

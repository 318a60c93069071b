"""What a client asks, after validation and tokenization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from control_plane.core.sampling_params import SamplingParams, StopConditions

RequestId = NewType("RequestId", str)


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

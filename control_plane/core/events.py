"""What the core tells the shell after a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from control_plane.core.request import RequestId


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request cost. Cached ones were in the prefix cache when it was first scheduled."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a request. `stop_token_id` is set when a request's own stop token ended it."""

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """New tokens of one request, and its end if this was it. Both empty never happens."""

    request_id: RequestId
    token_ids: list[int]
    finish: Finish | None = None

"""What a sequence has cost by its end: one value for the metrics and for the log."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.events import FinishReason, Usage


@dataclass(frozen=True, slots=True)
class Account:
    """An ended sequence. Times are in seconds since its request arrived.

    `queue_seconds`: to the first step that computes a part of it, or to its end if none did.
    `first_token_seconds`: None without a token. `seconds`: to its end in the engine; its client may
    read on for longer.
    """

    reason: FinishReason
    usage: Usage
    queue_seconds: float
    first_token_seconds: float | None
    seconds: float

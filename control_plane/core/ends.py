"""Where a sequence's next tokens reach their first end."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.events import FinishReason
from control_plane.core.request import StopConditions, StopScanner


@dataclass(frozen=True, slots=True)
class End:
    """`count` tokens are part of the output; `stop_token_id` as in Finish."""

    count: int
    reason: FinishReason
    stop_token_id: int | None = None


def first_end(
    ids: list[int], room: int, stop: StopConditions, scanner: StopScanner | None
) -> End | None:
    """The first end of tokens that come next: a stop string, a stop token, or the limit.

    `room` tokens are left to the limit. Where several ends come with the same token, the earliest
    named here is the reason. None: no end is among them, and the scanner has seen all.
    """
    ids = ids[:room]
    end = End(room, FinishReason.LENGTH) if len(ids) == room else None
    for index, token in enumerate(ids):
        if token in stop.stop_token_ids:
            end = End(index + 1, FinishReason.STOP, token)
            break
        if token in stop.end_of_sequence_ids:
            end = End(index + 1, FinishReason.STOP)
            break
    if scanner is not None:
        count = scanner.push(ids if end is None else ids[: end.count])
        if count is not None:
            return End(count, FinishReason.STOP)
    return end

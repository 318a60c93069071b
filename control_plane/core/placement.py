"""Which replica a new request should go to. Pure: decided on a snapshot of all loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How full a replica is. `replica` is its number; `attached`: its worker is there now.

    `free_kv_tokens` counts the slots that can be handed out, cached ones included. `room` is how
    many sequences it takes now; if none, `retry_after` is in how many seconds it should.
    """

    replica: int
    attached: bool
    waiting: int
    free_kv_tokens: int
    room: int
    retry_after: float


def order(loads: Sequence[Load]) -> list[int]:
    """The numbers of the replicas, the best place for a new request first.

    A replica whose worker is attached comes before one that waits for its worker; then the one
    where the fewest sequences wait; then the one with the most free KV; then the smallest number.
    """
    ranked = sorted(
        loads,
        key=lambda load: (not load.attached, load.waiting, -load.free_kv_tokens, load.replica),
    )
    return [load.replica for load in ranked]

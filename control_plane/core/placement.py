"""Which replica a request should go to. Pure: decided on a snapshot of all loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """How full a replica is, as one request sees it. `replica` is its number.

    `attached`: its worker is there and gives signs of life. `starts`: the request would start with
    the next plan. `waiting_token_count` are the prompts that wait there, `running` the sequences
    that run. `free_kv_tokens` counts the slots that can be handed out, cached ones included.
    `cached_token_count`: how many leading tokens of the request's prompt its prefix cache has.
    """

    replica: int
    attached: bool
    starts: bool
    waiting_token_count: int
    running: int
    free_kv_tokens: int
    cached_token_count: int = 0


def order(loads: Sequence[Load]) -> list[int]:
    """The numbers of the replicas, the best place for a request first.

    A replica whose worker is attached comes before one that waits for its worker, and one that
    would start the request at once before one that would queue it. Then the one where the fewest
    tokens are to be computed before the request's last prompt token, counted against the tokens it
    has cached; then the one where the fewest run; then the one with the most free KV; then the
    smallest number.
    """
    ranked = sorted(
        loads,
        key=lambda load: (
            not load.attached,
            not load.starts,
            load.waiting_token_count - load.cached_token_count,
            load.running,
            -load.free_kv_tokens,
            load.replica,
        ),
    )
    return [load.replica for load in ranked]

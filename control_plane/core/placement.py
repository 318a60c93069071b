"""Which replica a request should go to. Pure: decided on a snapshot of all loads.

Everything is counted in tokens that are to be computed, so that what a cached prefix saves can be
held against what the others of a replica cost. A request goes where its prefix is cached for as
long as that replica is not further ahead of the others than the prefix saves; then another replica
computes the prefix once, and has it too. So a prefix spreads over as many replicas as its requests
keep busy, and nothing goes back and forth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOAD_TOKENS = 256
"""What it counts that a request's adapter is to be loaded first."""
_RUNNING_TOKENS = 16
"""What a running sequence counts: the tokens that it computes beside a new one, roughly."""


@dataclass(frozen=True, slots=True)
class Load:
    """How full a replica is, as one request sees it. `replica` is its number.

    `attached`: its worker is there and gives signs of life. `starts`: a row and blocks are free for
    the request, behind those that wait there, and its last claims did not end without a token.
    `backlog_token_count` are the tokens of prompts
    that are still to be computed there, of waiting and of running sequences. `running`: how many
    run. `free_kv_tokens` counts the slots that can be handed out, cached ones included.
    `cached_token_count`: how many leading tokens of the request's prompt its prefix cache has.
    `lead_token_count`: how many tokens more than the mean of all it has computed, see Leads.
    `has_adapter`: the request's adapter is in a slot there, or the request has none.
    """

    replica: int
    attached: bool
    starts: bool
    backlog_token_count: int
    running: int
    free_kv_tokens: int
    cached_token_count: int = 0
    lead_token_count: int = 0
    has_adapter: bool = True


def order(loads: Sequence[Load], slack: int = 0) -> list[int]:
    """The numbers of the replicas, the best place for a request first.

    A replica whose worker is attached comes before one that waits for its worker, and one that
    would start the request at once before one that would queue it. Then the one where the fewest
    tokens are to be computed until the request has its answer, less those it has cached; that its
    adapter is to be loaded first counts like some tokens. Where it
    would start, a lead or lag of more than `slack` tokens counts as well: it stands for the load
    that comes in a while. Where it would queue, the queue itself tells. Then the one that lags
    most, then the one with the most free KV, then the smallest number.
    """
    ranked = sorted(
        loads,
        key=lambda load: (
            not load.attached,
            not load.starts,
            _cost(load, slack),
            load.lead_token_count,
            -load.free_kv_tokens,
            load.replica,
        ),
    )
    return [load.replica for load in ranked]


def _cost(load: Load, slack: int) -> int:
    cost = load.backlog_token_count + _RUNNING_TOKENS * load.running - load.cached_token_count
    if not load.has_adapter:
        cost += _LOAD_TOKENS
    lead = load.lead_token_count
    if load.starts and abs(lead) > slack:
        cost += lead - slack if lead > 0 else lead + slack
    return cost


class Leads:
    """How far each replica is ahead of the others in the tokens it has computed.

    At low load all replicas look idle whenever a request comes, and only this tells which of them
    does all the work. It is a memory, and short: no replica is further ahead or behind than
    `reach` tokens, so that one that was away, or is slower, has not much to catch up with. One
    that joins starts at the mean.
    """

    def __init__(self) -> None:
        self._totals: dict[int, int] = {}
        self._leads: dict[int, float] = {}

    def update(self, totals: Mapping[int, int], reach: int) -> dict[int, int]:
        """The lead of each replica, given the tokens that each has computed since it joined.

        `totals` has all replicas that may be chosen, by number; who is missing is forgotten.
        """
        grown = {
            number: lead + totals[number] - self._totals[number]
            for number, lead in self._leads.items()
            if number in totals
        }
        mean = sum(grown.values()) / len(grown) if grown else 0.0
        self._totals = dict(totals)
        self._leads = {
            number: min(max(grown.get(number, mean) - mean, -reach), reach) for number in totals
        }
        return {number: round(lead) for number, lead in self._leads.items()}

"""Which weights made which tokens of a sequence: noted when that changes, not token by token."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """Tokens, one after another, that the same weights have made.

    `weights_digest` is empty where nobody knows: a request that was resumed did not say.
    `kv_of_other_weights`: they were computed over KV that other weights had made.
    """

    token_count: int
    weights_digest: str
    weights_name: str = ""
    kv_of_other_weights: bool = False


Spans = tuple[WeightsSpan, ...]
"""In the order of the tokens; neighbours differ, and none is empty."""


def token_count(spans: Spans) -> int:
    """How many tokens they cover."""
    return sum(span.token_count for span in spans)


def extended(spans: Spans, span: WeightsSpan) -> Spans:
    """Spans with one more behind them, joined to the last where that is alike."""
    if span.token_count == 0:
        return spans
    if spans and replace(spans[-1], token_count=span.token_count) == span:
        count = spans[-1].token_count + span.token_count
        return (*spans[:-1], replace(span, token_count=count))
    return (*spans, span)

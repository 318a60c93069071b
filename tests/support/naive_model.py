"""What every client must get: one request alone, with no batch, no blocks and no steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from control_plane.core.events import FinishReason
from control_plane.core.request import OutputKind, Request
from control_plane.core.spans import Spans, WeightsSpan, extended
from tests.support.checking_worker import WEIGHTS, made_with, mask_of, next_allowed

Pair = tuple[int, int]
NAMED = replace(WEIGHTS, name=f"name of {WEIGHTS.digest}")


class PairScanner:
    """A stop string of two tokens."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._last = -1

    def push(self, token_ids: list[int]) -> int | None:
        for index, token in enumerate(token_ids):
            if (self._last, token) == self._pair:
                return index + 1
            self._last = token
        return None


Made = tuple[str, bool]
"""The weights of a token, and whether it came of KV that others had made."""


def spans_of(made: list[Made]) -> Spans:
    """As the core should tell it."""
    spans: Spans = ()
    for digest, is_kept in made:
        name = f"name of {digest}" if digest else ""
        spans = extended(spans, WeightsSpan(1, digest, name, is_kept))
    return spans


def alone(
    request: Request, pair: Pair | None, longest: int, digests: Sequence[str] = (WEIGHTS.digest,)
) -> tuple[list[int], FinishReason]:
    """The naive model: one request, no batch, no blocks, no steps. `digests`: the weights of each
    token, the last of all that follow."""
    adapter = "" if request.adapter is None else request.adapter.digest
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        constrained = request.output is OutputKind.HOLD
        mask = mask_of(request.seed, tokens) if constrained else None
        digest = made_with(digests[min(len(output), len(digests) - 1)], adapter)
        token = next_allowed(request.seed, tokens, mask, digest)
        tokens.append(token)
        output.append(token)
        if token in request.stop.stop_token_ids | request.stop.end_of_sequence_ids:
            return output, FinishReason.STOP
        if pair is not None and tuple(output[-2:]) == pair:
            return output, FinishReason.STOP
        if len(output) == request.stop.max_tokens or len(tokens) == longest:
            return output, FinishReason.LENGTH

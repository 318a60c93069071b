"""What a rank computes of a layer that is split over the tensor ranks of its stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_service.layers.linear import Linear
from worker_service.parallel.peers import Peers


class SummedLinear:
    """A projection split by its inputs: every rank has a term of the result."""

    def __init__(self, own: Linear, peers: Peers) -> None:
        """`own` has the bias on one rank only."""
        self._own = own
        self._peers = peers

    @property
    def byte_count(self) -> int:
        return self._own.byte_count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, own inputs] → [rows, out], the same on every rank."""
        return self._peers.reduce(self._own(x))


class GatheredLinear:
    """A projection split by its outputs, `widths` of which are each rank's."""

    def __init__(self, own: Linear, widths: Sequence[int], peers: Peers) -> None:
        self.own = own
        self._widths = tuple(widths)
        self._peers = peers

    @property
    def byte_count(self) -> int:
        return self.own.byte_count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out] on the first rank, [0, out] on the others."""
        return self._peers.gather(self.own(x), self._widths)


class Embedding:
    """Rows of a table by token id, of which this rank may have only a part."""

    def __init__(self, weight: torch.Tensor, tokens: range, peers: Peers | None) -> None:
        """`weight` [own tokens, hidden] of the ids `tokens`; `peers` have the others."""
        self.weight = weight
        self._tokens = tokens
        self._peers = peers

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids int64 [n] → a new [n, hidden]."""
        if self._peers is None:
            return self.weight.index_select(0, token_ids)
        places = token_ids - self._tokens.start
        absent = (places < 0) | (places >= len(self._tokens))
        rows = self.weight.index_select(0, places.masked_fill(absent, 0))
        return self._peers.reduce(rows.masked_fill_(absent.unsqueeze(1), 0.0))

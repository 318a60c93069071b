"""Draws of one token per row: temperature, min-p, top-k, top-p, then one uniform number.

Each row takes the path that its own parameters choose. Every sum runs in a fixed order, in
float64. Equal logits rank by token id, the lowest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from worker_service.domain.columns import IntColumn
from worker_service.domain.sampling import FloatColumn
from worker_service.sampling.rng import Purpose, uniforms
from worker_service.sampling.state import SamplingBatch

# Rows that need at most this many candidates are ranked without sorting the vocabulary.
_CANDIDATES = 1024
# On a CPU, whole vocabularies are weighed this many rows at a time: their float64 weights then stay
# in its cache, which takes a third of the time.
_ROWS_AT_ONCE = 2


class _Path(Enum):
    """How a row's candidates are found."""

    WHOLE_VOCABULARY = 1  # no top-k, no top-p: every token, in order of id
    TOP_P = 2  # no top-k
    SMALL_TOP_K = 3  # with or without top-p
    LARGE_TOP_K = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows that draw: `logits` float32 [n, vocabulary]; the rest [n, 1], float64 but `top_k`.

    `uses_min_p`: whether any row's min-p is above 0.
    """

    logits: torch.Tensor
    maxima: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor
    uses_min_p: bool

    def take(self, indices: torch.Tensor) -> _Rows:
        """Some of the rows, by their indices; all of them without a copy."""
        if indices.numel() == self.logits.shape[0]:
            return self
        return self._of_each(lambda column: column.index_select(0, indices))

    def parts(self) -> Iterator[_Rows]:
        """The rows in order, in parts of the size that is weighed fastest."""
        count = self.logits.shape[0]
        step = _ROWS_AT_ONCE if self.logits.device.type == "cpu" else count
        for start in range(0, count, step):
            yield self._of_each(itemgetter(slice(start, start + step)))

    def _of_each(self, select: Callable[[torch.Tensor], torch.Tensor]) -> _Rows:
        return _Rows(
            select(self.logits),
            select(self.maxima),
            select(self.temperature),
            select(self.top_k),
            select(self.top_p),
            select(self.min_p),
            select(self.uniform),
            self.uses_min_p,
        )

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities relative to the likeliest token's, 0 where min-p drops them; float64."""
        weights = logits.double().sub_(self.maxima).div_(self.temperature).exp_()
        return weights.masked_fill_(weights < self.min_p, 0.0) if self.uses_min_p else weights

    def sums(self) -> torch.Tensor:
        """Running sums [n, vocabulary] of all tokens' weights in order of id."""
        weights = self.weights(self.logits)
        return torch.cumsum(weights, dim=-1, out=weights)


def draw(
    logits: torch.Tensor, maxima: FloatColumn, batch: SamplingBatch, drawn: npt.NDArray[np.int64]
) -> IntColumn:
    """Tokens int32 [n] of the rows `drawn` int64 [n] of logits [S, vocabulary].

    `maxima` [S] are the rows' highest logits, finite where drawn.
    """
    vocabulary = logits.shape[1]
    own = batch.parameters if drawn.size == logits.shape[0] else batch.parameters.take(drawn)
    top_k = np.where((own.top_k == 0) | (own.top_k > vocabulary), vocabulary, own.top_k)
    indices = torch.from_numpy(drawn).to(logits.device)

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values[:, None]).to(logits.device)

    rows = _Rows(
        logits=(logits if drawn.size == logits.shape[0] else logits[indices]).float(),
        maxima=column(maxima[drawn].astype(np.float64)),
        temperature=column(own.temperature.astype(np.float64)),
        top_k=column(top_k),
        top_p=column(own.top_p.astype(np.float64)),
        min_p=column(own.min_p.astype(np.float64)),
        uniform=column(uniforms(own.seed, batch.positions[drawn], Purpose.TOKEN)),
        uses_min_p=bool((own.min_p > 0).any()),
    )
    keeps_all = top_k == vocabulary
    paths = (
        (_Path.WHOLE_VOCABULARY, keeps_all & (own.top_p >= 1)),
        (_Path.TOP_P, keeps_all & (own.top_p < 1)),
        (_Path.SMALL_TOP_K, ~keeps_all & (top_k <= _CANDIDATES)),
        (_Path.LARGE_TOP_K, ~keeps_all & (top_k > _CANDIDATES)),
    )
    tokens = torch.empty(drawn.size, dtype=torch.int64, device=logits.device)
    for path, members in paths:
        if members.any():
            chosen = torch.from_numpy(np.flatnonzero(members)).to(logits.device)
            tokens.index_copy_(0, chosen, _draw_path(path, rows.take(chosen)))
    result: IntColumn = tokens.cpu().numpy().astype(np.int32)
    return result


def _draw_path(path: _Path, rows: _Rows) -> torch.Tensor:
    match path:
        case _Path.WHOLE_VOCABULARY:
            parts = [_invert(part.sums(), part.uniform) for part in rows.parts()]
            return torch.cat(parts).squeeze(1)
        case _Path.TOP_P:
            return _draw_top_p(rows)
        case _Path.SMALL_TOP_K:
            return _draw_small_top_k(rows)
        case _Path.LARGE_TOP_K:
            return _draw_sorted(rows, None)


def _draw_top_p(rows: _Rows) -> torch.Tensor:
    """Draws by top-p alone. The likeliest candidates nearly always reach it."""
    totals = torch.cat([part.sums()[:, -1:] for part in rows.parts()])
    return _draw_ranked(rows, totals, _CANDIDATES)


def _draw_small_top_k(rows: _Rows) -> torch.Tensor:
    """Draws by a small top-k. One more candidate than it keeps shows whether the last is tied."""
    return _draw_ranked(rows, None, int(rows.top_k.max()) + 1)


def _draw_ranked(rows: _Rows, totals: torch.Tensor | None, count: int) -> torch.Tensor:
    """Draws tokens [n] among the `count` likeliest, and among all for rows that need more.

    `totals` float64 [n, 1]: see _kept_weights.
    """
    if count >= rows.logits.shape[1]:
        return _draw_sorted(rows, totals)
    values, ids = _ranked_candidates(rows.logits, count)
    kept = _kept_weights(rows, values, totals)
    # A row needs more when its last kept token may be tied with one that is not a candidate.
    last = ((kept > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    tokens = _pick(kept, ids, rows.uniform)
    needing = torch.nonzero((values.gather(1, last) <= values[:, -1:]).squeeze(1)).squeeze(1)
    if needing.numel():
        some_totals = None if totals is None else totals.index_select(0, needing)
        tokens.index_copy_(0, needing, _draw_sorted(rows.take(needing), some_totals))
    return tokens


def _draw_sorted(rows: _Rows, totals: torch.Tensor | None) -> torch.Tensor:
    """Draws tokens [n] among all. Sorts the logits without their ids: the lowest kept logit says
    which tokens are kept. Among the tokens equal to it, those with the lowest ids are kept."""
    values = _sorted_descending(rows.logits)
    kept_count = (_kept_weights(rows, values, totals) > 0).sum(dim=-1, keepdim=True)
    least = values.gather(1, (kept_count - 1).clamp_(min=0))
    above, tied = rows.logits > least, rows.logits == least
    room = kept_count - above.sum(dim=-1, keepdim=True)
    kept = above.logical_or_(tied & (tied.cumsum(dim=-1) <= room))
    weights = rows.weights(rows.logits).masked_fill_(kept.logical_not_(), 0.0)
    return _invert(torch.cumsum(weights, dim=-1, out=weights), rows.uniform).squeeze(1)


def _sorted_descending(logits: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary], each row sorted, the highest first."""
    if logits.device.type == "cpu":
        # Several times as fast as torch's sort.
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=1))
    return torch.sort(logits, dim=-1, descending=True).values


def _ranked_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's `count` highest logits and their ids [n, count], the highest first and
    equal ones by id, the lowest first."""
    if logits.device.type == "cpu":
        # Ten times as fast as torch's topk.
        least = logits.shape[1] - count
        some = torch.from_numpy(np.argpartition(logits.numpy(), least, axis=1)[:, least:])
    else:
        some = logits.topk(count, dim=-1, sorted=False).indices
    ids = some.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _kept_weights(rows: _Rows, values: torch.Tensor, totals: torch.Tensor | None) -> torch.Tensor:
    """Weights [n, m] of ranked logits, 0 where min-p, top-k or top-p drops them.

    top-p counts against `totals` [n, 1], by default the sum of what min-p and top-k left.
    """
    weights = rows.weights(values)
    ranks = torch.arange(values.shape[1], device=values.device)
    weights.masked_fill_(ranks >= rows.top_k, 0.0)
    sums = weights.cumsum(dim=-1)
    if totals is None:
        totals = sums[:, -1:]
    before = torch.nn.functional.pad(sums[:, :-1], (1, 0))
    dropped = (before >= rows.top_p * totals) & (rows.top_p < 1)
    return weights.masked_fill_(dropped, 0.0)


def _pick(weights: torch.Tensor, ids: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [n] drawn from `ids` [n, m] by weights [n, m]: the inverse CDF in order of id."""
    ordered_ids, order = ids.sort(dim=-1)
    index = _invert(weights.gather(1, order).cumsum(dim=-1), uniform)
    return ordered_ids.gather(1, index).squeeze(1)


def _invert(sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index [n, 1] whose running sum passes uniform · total; its weight is above 0."""
    totals = sums[:, -1:].contiguous()
    below = torch.nextafter(totals, torch.zeros_like(totals))
    return torch.searchsorted(sums, torch.minimum(uniform * totals, below), right=True)

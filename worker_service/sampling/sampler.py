"""From logits to one token per row.

The order, part of the contract: grammar mask → float32 → greedy argmax, or temperature → min-p →
top-k → top-p → draw. A row's token depends on its own logits, parameters, seed and position only:
each row takes the path its own parameters name, and every sum runs in a fixed order, in float64.
Equal logits rank by token id, the lowest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import torch

from worker_service.domain.columns import IntColumn
from worker_service.sampling.rng import Purpose, UInt64s, uniforms

FloatColumn = npt.NDArray[np.float32]
BoolColumn = npt.NDArray[np.bool_]

# Up to so many candidates a row is ranked without sorting its whole vocabulary.
_CANDIDATES = 1024
# Whole vocabularies are weighed so many rows at a time on a CPU: their float64 then stays in its
# cache, which takes a third of the time.
_ROWS_AT_ONCE = 2


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Parameters of S rows, columns [S] on the host; `positions` are those of the new tokens."""

    temperature: FloatColumn
    top_k: IntColumn
    top_p: FloatColumn
    min_p: FloatColumn
    seeds: UInt64s
    positions: IntColumn


@dataclass(frozen=True, slots=True, eq=False)
class MaskBatch:
    """Masks of some of the rows: `indices` [m] into them; `bitmasks` uint32 [m, words]."""

    indices: npt.NDArray[np.int64]
    bitmasks: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`tokens` int32 [S], meaningful where neither flag is set: `invalid_logits`, the row's logits
    hold NaN or +inf or allow nothing but -inf; `empty_mask`, its mask allows no token."""

    tokens: IntColumn
    invalid_logits: BoolColumn
    empty_mask: BoolColumn


class _Path(Enum):
    """How a row's candidates are found."""

    WHOLE = 1  # every token, in order of id
    NUCLEUS = 2  # the most likely until top-p is reached
    FEW = 3  # a small top-k
    SORTED = 4  # a large top-k


def sample(logits: torch.Tensor, batch: SamplingBatch, masks: MaskBatch | None) -> Sampled:
    """Samples logits [S, vocabulary] of any float dtype; masked rows are overwritten in place."""
    row_count = logits.shape[0]
    invalid = np.zeros(row_count, dtype=bool)
    empty = np.zeros(row_count, dtype=bool)
    if masks is not None and masks.indices.size:
        invalid[masks.indices], empty[masks.indices] = _apply_masks(logits, masks)
    tokens, maxima = _highest(logits)
    invalid |= ~np.isfinite(maxima)
    invalid &= ~empty
    drawn = np.flatnonzero((batch.temperature > 0) & ~invalid & ~empty)
    if drawn.size:
        tokens[drawn] = _draw(logits, maxima, batch, drawn)
    return Sampled(tokens, invalid, empty)


def _highest(logits: torch.Tensor) -> tuple[IntColumn, FloatColumn]:
    """Each row's first highest token int32 [S] and its logit [S]: NaN in a row that holds one."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        # An eighth of the time of torch's maximum, on one thread.
        host = logits.numpy()
        tokens = host.argmax(axis=1)
        return tokens.astype(np.int32), host[np.arange(tokens.size), tokens]
    maxima, argmax = logits.max(dim=-1)
    return argmax.cpu().numpy().astype(np.int32), maxima.float().cpu().numpy()


def _apply_masks(logits: torch.Tensor, masks: MaskBatch) -> tuple[BoolColumn, BoolColumn]:
    """Which masked rows hold NaN, masked or not, and which may take no token."""
    octets = masks.bitmasks.astype("<u4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little").view(bool)
    indices = torch.from_numpy(masks.indices).to(logits.device)
    rows = logits.index_select(0, indices)
    holds_nan: BoolColumn = rows.amax(dim=-1).isnan().cpu().numpy()
    forbidden = torch.from_numpy(~allowed).to(logits.device)
    logits.index_copy_(0, indices, rows.masked_fill_(forbidden, float("-inf")))
    empty: BoolColumn = np.logical_not(allowed.any(axis=1))
    return holds_nan, empty


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows that draw: `logits` float32 [n, vocabulary]; the rest [n, 1], float64 but `top_k`.

    `uses_min_p`: whether any row's is above 0.
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
        if indices.numel() == self.logits.shape[0]:
            return self
        return _Rows(
            self.logits.index_select(0, indices),
            self.maxima.index_select(0, indices),
            self.temperature.index_select(0, indices),
            self.top_k.index_select(0, indices),
            self.top_p.index_select(0, indices),
            self.min_p.index_select(0, indices),
            self.uniform.index_select(0, indices),
            self.uses_min_p,
        )

    def parts(self) -> Iterator[_Rows]:
        """The rows in order, as many at once as their whole vocabularies are weighed best."""
        count = self.logits.shape[0]
        step = _ROWS_AT_ONCE if self.logits.device.type == "cpu" else count
        for start in range(0, count, step):
            own = slice(start, start + step)
            yield _Rows(
                self.logits[own],
                self.maxima[own],
                self.temperature[own],
                self.top_k[own],
                self.top_p[own],
                self.min_p[own],
                self.uniform[own],
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


def _draw(
    logits: torch.Tensor, maxima: FloatColumn, batch: SamplingBatch, drawn: npt.NDArray[np.int64]
) -> IntColumn:
    """Tokens int32 [n] of the rows `drawn`."""
    vocabulary = logits.shape[1]
    indices = torch.from_numpy(drawn).to(logits.device)

    def column(values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values[:, None]).to(logits.device)

    top_k, top_p = batch.top_k[drawn], batch.top_p[drawn]
    top_k = np.where((top_k == 0) | (top_k > vocabulary), vocabulary, top_k)
    rows = _Rows(
        logits=(logits if drawn.size == logits.shape[0] else logits[indices]).float(),
        maxima=column(maxima[drawn].astype(np.float64)),
        temperature=column(batch.temperature[drawn].astype(np.float64)),
        top_k=column(top_k.astype(np.int64)),
        top_p=column(top_p.astype(np.float64)),
        min_p=column(batch.min_p[drawn].astype(np.float64)),
        uniform=column(uniforms(batch.seeds[drawn], batch.positions[drawn], Purpose.TOKEN)),
        uses_min_p=bool((batch.min_p[drawn] > 0).any()),
    )
    whole = top_k == vocabulary
    paths = (
        (_Path.WHOLE, whole & (top_p >= 1)),
        (_Path.NUCLEUS, whole & (top_p < 1)),
        (_Path.FEW, ~whole & (top_k <= _CANDIDATES)),
        (_Path.SORTED, ~whole & (top_k > _CANDIDATES)),
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
        case _Path.WHOLE:
            parts = [_invert(part.sums(), part.uniform) for part in rows.parts()]
            return torch.cat(parts).squeeze(1)
        case _Path.NUCLEUS:
            return _draw_nucleus(rows)
        case _Path.FEW:
            return _draw_few(rows)
        case _Path.SORTED:
            return _draw_sorted(rows, None)


def _draw_nucleus(rows: _Rows) -> torch.Tensor:
    """top-p alone. The few likeliest tokens nearly always hold it."""
    totals = torch.cat([part.sums()[:, -1:] for part in rows.parts()])
    return _draw_ranked(rows, totals, _CANDIDATES)


def _draw_few(rows: _Rows) -> torch.Tensor:
    """A small top-k: its tokens and one more, which shows whether the last is tied."""
    return _draw_ranked(rows, None, int(rows.top_k.max()) + 1)


def _draw_ranked(rows: _Rows, totals: torch.Tensor | None, count: int) -> torch.Tensor:
    """Draws among the `count` likeliest; for rows that need more, among all."""
    if count >= rows.logits.shape[1]:
        return _draw_sorted(rows, totals)
    values, ids = _ranked_candidates(rows.logits, count)
    kept = _kept_weights(rows, values, totals)
    # Valid when the last token kept ranks above every token that is no candidate.
    last = ((kept > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    tokens = _pick(kept, ids, rows.uniform)
    rest = torch.nonzero((values.gather(1, last) <= values[:, -1:]).squeeze(1)).squeeze(1)
    if rest.numel():
        some_totals = None if totals is None else totals.index_select(0, rest)
        tokens.index_copy_(0, rest, _draw_sorted(rows.take(rest), some_totals))
    return tokens


def _draw_sorted(rows: _Rows, totals: torch.Tensor | None) -> torch.Tensor:
    """Sorts the logits alone: the last one kept says which tokens are, of its tie the lowest."""
    values = _falling(rows.logits)
    kept_count = (_kept_weights(rows, values, totals) > 0).sum(dim=-1, keepdim=True)
    least = values.gather(1, (kept_count - 1).clamp_(min=0))
    above, tied = rows.logits > least, rows.logits == least
    room = kept_count - above.sum(dim=-1, keepdim=True)
    kept = above.logical_or_(tied & (tied.cumsum(dim=-1) <= room))
    weights = rows.weights(rows.logits).masked_fill_(kept.logical_not_(), 0.0)
    return _invert(torch.cumsum(weights, dim=-1, out=weights), rows.uniform).squeeze(1)


def _falling(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        # Several times as fast as torch's sort.
        return torch.from_numpy(-np.sort(-logits.numpy(), axis=1))
    return torch.sort(logits, dim=-1, descending=True).values


def _ranked_candidates(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` highest logits and their ids [n, count], falling, equal ones by rising id."""
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

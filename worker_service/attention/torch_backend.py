"""Paged attention with torch alone: gather into standing buffers, then fused SDPA.

Decoding rows run batched, the query heads of one KV head standing in as query positions; longer
extends run row by row in tiles of queries. No loop over tokens, none over decoding rows.

On the CPU, SDPA's flash kernel walks keys in tiles of 512. A row then mostly keeps its bits,
whatever it is batched, chunked or padded with, as long as each of its products is one of those that
the matrix library sums in the same order. Which those are was measured where that library has
AVX-512 code (see the constants); elsewhere rows differ by rounding, so nothing is promised.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from worker_service.attention.interface import AttentionConfig, BackendType, LayerCache
from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import NULL_BLOCK, IntColumn

# The flash kernel's tiles. The keys in one are a multiple of 16 up to its half, or all of it; no
# tile is left with one or two queries.
_KEY_TILE = 512
_KEY_MULTIPLE = 16
_QUERY_TILE = 32
_MIN_QUERY_ROWS = 3
_TILE_QUERIES = 256
_MIN_GATHER_TOKENS = 16384
# Rows share a batched decode until splitting them saves this many padded tokens: about what one
# more group's kernel calls cost.
_SPLIT_GAIN_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    """Rows of one query token, padded to one context: `tokens` int64 [B], their place in the step;
    `blocks` int64 [B · blocks per row]; `mask` [B, 1, 1, keys], 0 or -inf."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries `start` to `end` of the step over gathered keys 0 to `key_count`, and where their
    mask begins in the window's master."""

    start: int
    end: int
    key_count: int
    mask_column: int


@dataclass(frozen=True, slots=True, eq=False)
class _Extend:
    """A row of several query tokens: `blocks` int64, padded; its tiles in order."""

    blocks: torch.Tensor
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _WindowPlan:
    """The step as layers of one window see it."""

    decodes: tuple[_DecodeGroup, ...]
    extends: tuple[_Extend, ...]


class TorchBackend:
    """Owns the gather buffers and the masks' masters."""

    def __init__(self, config: AttentionConfig, caches: tuple[LayerCache, ...]) -> None:
        self.config = config
        self.caches = tuple(
            LayerCache(cache.keys.flatten(1), cache.values.flatten(1)) for cache in caches
        )
        self.max_keys = _max_keys(config)
        self.capacity_blocks = _capacity_blocks(config)
        widest = max(cache.keys.shape[1] for cache in self.caches)
        self._gathered = torch.empty(
            (2, self.capacity_blocks * widest), dtype=config.data_type, device=config.device
        )
        windows = dict.fromkeys(heads.window for heads in config.layers)
        self.masters = {window: self._master_mask(window) for window in windows}

    @property
    def workspace_bytes(self) -> int:
        return self._gathered.nbytes + sum(mask.nbytes for mask in self.masters.values())

    def plan(self, batch: StepBatch) -> TorchStep:
        return TorchStep(self, batch)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies blocks [n] of a layer into the buffers: keys, values [n, block elements]."""
        cache = self.caches[layer]
        count, width = blocks.shape[0], cache.keys.shape[1]
        keys, values = self._gathered[:, : count * width].view(2, count, width)
        torch.index_select(cache.keys, 0, blocks, out=keys)
        torch.index_select(cache.values, 0, blocks, out=values)
        return keys, values

    def _master_mask(self, window: int | None) -> torch.Tensor:
        """[tile queries, columns]: query i sees column c when i - window < c - max keys ≤ i.

        A tile whose first query stands s places after the first gathered key reads its mask at
        column max keys - s, so that no mask is built during a step.
        """
        queries = torch.arange(_TILE_QUERIES).unsqueeze(1)
        width = _master_width(self.config)
        columns = torch.arange(width).unsqueeze(0) - self.max_keys
        visible = columns <= queries
        if window is not None:
            visible &= columns > queries - window
        mask = torch.full(visible.shape, float("-inf"), dtype=self.config.data_type)
        return mask.masked_fill_(visible, 0.0).to(self.config.device)


class TorchStep:
    """See StepAttention."""

    def __init__(self, backend: TorchBackend, batch: StepBatch) -> None:
        self._backend = backend
        self._config = backend.config
        self._slots = self._to_device(batch.slots)
        self._plans = {window: self._plan_window(batch, window) for window in backend.masters}

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache = self._backend.caches[layer]
        width = keys.shape[1] * keys.shape[2]
        cache.keys.view(-1, width).index_copy_(0, self._slots, keys.flatten(1))
        cache.values.view(-1, width).index_copy_(0, self._slots, values.flatten(1))

    def forward(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        window = self._config.layers[layer].window
        plan = self._plans[window]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in plan.decodes:
            out.index_copy_(0, group.tokens, self._decode(layer, group, queries))
        for extend in plan.extends:
            self._extend(layer, extend, self._backend.masters[window], queries, out)
        return out

    # --- planning -----------------------------------------------------------------------------

    def _plan_window(self, batch: StepBatch, window: int | None) -> _WindowPlan:
        """Key tiles wholly before what any query of a row sees are left out."""
        block_size = self._config.block_size
        oldest = np.zeros_like(batch.context_lengths)
        if window is not None:
            oldest = np.maximum(batch.context_lengths - batch.query_lengths - window + 1, 0)
        unit = math.lcm(_KEY_TILE, block_size)
        first_blocks = oldest // unit * (unit // block_size)
        key_counts = batch.context_lengths - first_blocks * block_size
        is_decode = batch.query_lengths == 1
        decodes = tuple(
            self._plan_decodes(batch, rows, first_blocks, key_counts, window)
            for rows in self._split(np.flatnonzero(is_decode), key_counts)
        )
        extends = tuple(
            self._plan_extend(batch, int(row), int(first_blocks[row]), int(key_counts[row]))
            for row in np.flatnonzero(~is_decode)
        )
        return _WindowPlan(decodes, extends)

    def _split(
        self, rows: npt.NDArray[np.int64], key_counts: IntColumn
    ) -> list[npt.NDArray[np.int64]]:
        """Groups of rows of like context, each small enough for the gather buffers."""
        if not rows.size:
            return []
        rows = rows[np.argsort(-key_counts[rows], kind="stable")]
        lengths = key_counts[rows]
        # Candidate cuts: where the context shrinks by √2. Few, however many rows there are.
        cuts = np.flatnonzero(np.diff(np.floor(2 * np.log2(lengths)))) + 1
        bounds, start = [0], 0
        for cut in cuts.tolist():
            # Rows from `cut` on would be padded to the group's longest.
            if (rows.size - cut) * int(lengths[start] - lengths[cut]) > _SPLIT_GAIN_TOKENS:
                bounds.append(cut)
                start = cut
        bounds.append(rows.size)
        groups = []
        for begin, end in itertools.pairwise(bounds):
            keys = _padded_keys(int(lengths[begin]))
            step = self._backend.capacity_blocks // -(-keys // self._config.block_size)
            groups += [rows[at : min(at + step, end)] for at in range(begin, end, step)]
        return groups

    def _plan_decodes(
        self,
        batch: StepBatch,
        rows: npt.NDArray[np.int64],
        first_blocks: IntColumn,
        key_counts: IntColumn,
        window: int | None,
    ) -> _DecodeGroup:
        padded = _padded_keys(int(key_counts[rows].max()))
        block_count = -(-padded // self._config.block_size)
        columns = first_blocks[rows, None] + np.arange(block_count, dtype=np.int32)
        tables = batch.block_tables[rows]
        inside = columns < tables.shape[1]
        blocks = np.take_along_axis(tables, np.where(inside, columns, 0), axis=1)
        keys = np.arange(padded, dtype=np.int32)
        visible = keys < key_counts[rows, None]
        if window is not None:
            visible &= keys >= key_counts[rows, None] - window
        mask = np.where(visible, np.float32(0), np.float32("-inf"))[:, None, None, :]
        return _DecodeGroup(
            tokens=self._to_device(batch.query_starts[rows]),
            blocks=self._to_device(np.where(inside, blocks, NULL_BLOCK).reshape(-1)),
            mask=torch.from_numpy(mask).to(self._config.device, self._config.data_type),
        )

    def _plan_extend(self, batch: StepBatch, row: int, first_block: int, key_count: int) -> _Extend:
        block_size, max_keys = self._config.block_size, self._backend.max_keys
        held = batch.block_tables[row, first_block : first_block + -(-key_count // block_size)]
        padded_blocks = -(-_padded_keys(key_count) // block_size)
        blocks = np.full(padded_blocks, NULL_BLOCK, dtype=np.int32)
        blocks[: held.size] = held
        start, end = int(batch.query_starts[row]), int(batch.query_starts[row + 1])
        length = end - start
        before = key_count - length
        tiles = []
        for offset in range(0, length, _TILE_QUERIES):
            end = min(offset + _TILE_QUERIES, length)
            seen = _padded_keys(before + end)
            tiles.append(_Tile(start + offset, start + end, seen, max_keys - before - offset))
        return _Extend(self._to_device(blocks), tuple(tiles))

    def _to_device(self, column: IntColumn) -> torch.Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(self._config.device)

    # --- execution ----------------------------------------------------------------------------

    def _decode(self, layer: int, group: _DecodeGroup, queries: torch.Tensor) -> torch.Tensor:
        """[B, heads, head_dim] for the group's rows."""
        shape = self._config.layers[layer]
        rows, kv_heads, dim = group.tokens.shape[0], shape.kv_head_count, shape.head_dim
        key_count = group.mask.shape[-1]
        keys, values = (
            gathered.view(rows, -1, kv_heads, dim)[:, :key_count].transpose(1, 2)
            for gathered in self._backend.gather(layer, group.blocks)
        )
        heads = queries.index_select(0, group.tokens).view(rows, kv_heads, -1, dim)
        group_size = heads.shape[2]
        attended = F.scaled_dot_product_attention(
            _pad_queries(heads), keys, values, attn_mask=group.mask, scale=shape.scale
        )
        return attended[:, :, :group_size].reshape(rows, shape.head_count, dim)

    def _extend(
        self,
        layer: int,
        extend: _Extend,
        master: torch.Tensor,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        shape = self._config.layers[layer]
        kv_heads, dim = shape.kv_head_count, shape.head_dim
        group_size = shape.head_count // kv_heads
        # [kv_heads, 1 → group, keys, dim]: KV heads stand as the batch, shared without a copy.
        keys, values = (
            gathered.view(-1, kv_heads, dim).transpose(0, 1).unsqueeze(1)
            for gathered in self._backend.gather(layer, extend.blocks)
        )
        for tile in extend.tiles:
            length = tile.end - tile.start
            heads = queries[tile.start : tile.end].view(length, kv_heads, group_size, dim)
            heads = _pad_queries(heads.permute(1, 2, 0, 3))
            columns = slice(tile.mask_column, tile.mask_column + tile.key_count)
            attended = F.scaled_dot_product_attention(
                heads,
                keys[:, :, : tile.key_count].expand(-1, group_size, -1, -1),
                values[:, :, : tile.key_count].expand(-1, group_size, -1, -1),
                attn_mask=master[: heads.shape[2], columns],
                scale=shape.scale,
            )
            tokens = out[tile.start : tile.end].view(length, kv_heads, group_size, dim)
            tokens.copy_(attended[:, :, :length].permute(2, 0, 1, 3))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _padded_keys(key_count: int) -> int:
    """How many keys to multiply with for queries that see up to `key_count`."""
    rest = key_count % _KEY_TILE
    padded = _KEY_TILE if rest > _KEY_TILE // 2 else _round_up(rest, _KEY_MULTIPLE)
    return key_count - rest + padded


def _pad_queries(queries: torch.Tensor) -> torch.Tensor:
    """Pads [.., .., queries, dim] with zeros where a tile would be left with too few queries."""
    rest = queries.shape[2] % _QUERY_TILE
    if 0 < rest < _MIN_QUERY_ROWS:
        return F.pad(queries, (0, 0, 0, _MIN_QUERY_ROWS - rest))
    return queries


def _probe(config: AttentionConfig) -> str | None:
    del config  # runs anywhere torch does
    return None


def _max_keys(config: AttentionConfig) -> int:
    return _round_up(config.max_length, _KEY_TILE)


def _capacity_blocks(config: AttentionConfig) -> int:
    """Blocks that the gather buffers hold."""
    return -(-max(_max_keys(config), _MIN_GATHER_TOKENS) // config.block_size)


def _master_width(config: AttentionConfig) -> int:
    keys = _max_keys(config)
    return keys + min(keys, _TILE_QUERIES + _KEY_TILE)


def _workspace(config: AttentionConfig) -> int:
    """Bytes of the gather buffers and the masks' masters."""
    widest = max(heads.kv_head_count * heads.head_dim for heads in config.layers)
    gathered = 2 * _capacity_blocks(config) * config.block_size * widest
    windows = {heads.window for heads in config.layers}
    masters = len(windows) * _TILE_QUERIES * _master_width(config)
    return (gathered + masters) * config.data_type.itemsize


TORCH = BackendType("torch", _probe, TorchBackend, _workspace)

"""The CPU kernels on tensors: checks of dtype, shape and contiguity, then one call each.

Everything is float32 on the CPU unless it says otherwise, row-major and contiguous. A wrong
argument is a bug of ours and fails an assertion before any pointer is passed. Each output element
is computed by one fixed sequence of operations that does not depend on other rows, on how a
sequence is cut into chunks, or on the number of threads (src/linear.cpp, src/attention_tile.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import pointer
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.kernels.cpu import library
from worker_service.kernels.cpu.compiler import KernelsUnavailable
from worker_service.kernels.cpu.library import MAX_GROUP_SIZE, Context, InstructionSet

_INT8 = 1
_KV_KINDS = {torch.float32: 0, torch.bfloat16: 1}
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [out_features, in_features] in the kernels' own layout, of one instruction set.

    `group_size`: columns that share an int8 scale; None: float32.
    """

    storage: torch.Tensor
    out_features: int
    in_features: int
    group_size: int | None

    @property
    def byte_count(self) -> int:
        return self.storage.numel()

    def descriptor(self) -> library.Packed:
        """The ABI's view; valid while this object lives."""
        kind = 0 if self.group_size is None else _INT8
        return library.Packed(
            self.storage.data_ptr(), self.out_features, self.in_features, kind, self.group_size or 0
        )


@dataclass(frozen=True, slots=True, eq=False)
class PagedCache:
    """One layer's `keys` [blocks, kv_heads, head_dim, block_size] and `values` [blocks, kv_heads,
    block_size, head_dim], float32 or bf16."""

    keys: torch.Tensor
    values: torch.Tensor

    def descriptor(self) -> library.Cache:
        """The ABI's view; valid while this object lives."""
        assert self.keys.shape == self.values.mT.shape and self.keys.dtype == self.values.dtype
        assert self.keys.is_contiguous() and self.values.is_contiguous()
        _, kv_heads, block_size, head_dim = self.values.shape
        return library.Cache(
            self.keys.data_ptr(),
            self.values.data_ptr(),
            _KV_KINDS[self.keys.dtype],
            block_size,
            kv_heads,
            head_dim,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RopeTables:
    """`cosines`, `sines` [positions, rotary_dim / 2]; pairs are (i, i + rotary_dim / 2)."""

    cosines: torch.Tensor
    sines: torch.Tensor

    @property
    def rotary_dim(self) -> int:
        return 2 * self.cosines.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMSNorm weights [head_dim] that q and k heads pass before the rotation (Qwen 3)."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


def address(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """The data pointer of a contiguous CPU tensor of that dtype; None for None."""
    if tensor is None:
        return None
    assert tensor.dtype == dtype, f"{tensor.dtype} where {dtype} belongs"
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    return tensor.data_ptr()


def describe(batch: StepBatch) -> library.Batch:
    """The ABI's view of a step; valid while `batch` lives."""
    columns = (
        batch.query_starts,
        batch.context_lengths,
        batch.block_tables,
        batch.positions,
        batch.slots,
    )
    for column in columns:
        assert column.dtype == np.int32 and column.flags.c_contiguous
    sequences = batch.context_lengths.size
    assert batch.query_starts.size == sequences + 1 and batch.slots.size == batch.positions.size
    assert batch.block_tables.ndim == 2 and batch.block_tables.shape[0] == sequences
    return library.Batch(
        batch.token_count,
        sequences,
        batch.query_starts.ctypes.data,
        batch.context_lengths.ctypes.data,
        batch.block_tables.ctypes.data,
        batch.block_tables.shape[1],
        batch.positions.ctypes.data,
        batch.slots.ctypes.data,
    )


def linear_call(
    packed: PackedWeight, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None
) -> library.LinearCall:
    """The ABI's view of a product; valid while its tensors live."""
    return library.LinearCall(
        packed=pointer(packed.descriptor()),
        bias=address(bias),
        x=address(x),
        x_stride=packed.in_features,
        rows=x.shape[0],
        y=address(out),
        y_stride=packed.out_features,
    )


class CpuKernels:
    """The kernels of one opened context. Belongs to one thread at a time."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def packed_bytes(
        self, out_features: int, in_features: int, *, group_size: int | None = None
    ) -> int:
        """The byte_count of what `pack` makes of a weight [out, in]."""
        group = None if group_size is None else min(group_size, in_features)
        kind = 0 if group is None else _INT8
        return self.context.packed_bytes(
            library.Packed(None, out_features, in_features, kind, group or 0)
        )

    def pack(self, weight: torch.Tensor, *, group_size: int | None = None) -> PackedWeight:
        """Packs `weight` [out, in]; with `group_size` to int8, a scale per group and output."""
        out_features, in_features = weight.shape
        assert out_features > 0 and in_features > 0
        assert group_size is None or 0 < group_size <= MAX_GROUP_SIZE
        group = None if group_size is None else min(group_size, in_features)
        size = self.packed_bytes(out_features, in_features, group_size=group)
        storage = torch.empty(size, dtype=torch.uint8)
        self.context.advise_huge_pages(storage.data_ptr(), storage.numel())
        packed = PackedWeight(storage, out_features, in_features, group)
        weight = weight.detach().to(torch.float32).contiguous()
        self.context.run(
            library.PackCall(
                packed=pointer(packed.descriptor()),
                weight=address(weight),
                weight_stride=weight.stride(0),
            )
        )
        return packed

    def linear(
        self,
        x: torch.Tensor,
        packed: PackedWeight,
        out: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`out` [T, out] = `x` [T, in] times the packed weight's transpose, plus `bias` [out].

        For an int8 weight `x` is taken as int16, with a scale per row and group of inputs.
        """
        rows, width = x.shape
        assert width == packed.in_features and out.shape == (rows, packed.out_features)
        assert bias is None or bias.shape == (packed.out_features,)
        self.context.run(linear_call(packed, x, out, bias))
        return out

    def embed(self, packed: PackedWeight, token_ids: IntColumn, out: torch.Tensor) -> torch.Tensor:
        """`out` [T, in]: the packed weight's rows `token_ids` int32 [T], each in [0, out)."""
        assert token_ids.dtype == np.int32 and token_ids.flags.c_contiguous
        assert out.shape == (token_ids.size, packed.in_features)
        self.context.run(
            library.GatherCall(
                packed=pointer(packed.descriptor()),
                ids=token_ids.ctypes.data,
                count=token_ids.size,
                out=address(out),
            )
        )
        return out

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        out: torch.Tensor,
        *,
        added: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`x` [T, H] += `added` in place, then `out` = x / rms(x) * `weight` [H]."""
        rows, width = x.shape
        assert out.shape == x.shape and weight.shape == (width,)
        assert added is None or added.shape == x.shape
        self.context.run(
            library.RmsNormCall(
                x=address(x),
                added=address(added),
                weight=address(weight),
                epsilon=epsilon,
                rows=rows,
                width=width,
                out=address(out),
            )
        )
        return out

    def silu_multiply(self, gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` [T, I] = silu(gate) * up for `gate_up` [T, 2 I], the gates first."""
        rows, width = out.shape
        assert gate_up.shape == (rows, 2 * width)
        self.context.run(
            library.SiluMultiplyCall(
                gate_up=address(gate_up), rows=rows, width=width, out=address(out)
            )
        )
        return out

    def rope_write(
        self,
        qkv: torch.Tensor,
        tables: RopeTables,
        cache: PagedCache,
        batch: StepBatch,
        *,
        norms: HeadNorms | None = None,
    ) -> None:
        """Rotates q and k of `qkv` [T, (q_heads + 2 kv_heads) head_dim] in place by position, and
        writes k and v to the batch's slots of the cache."""
        tokens, width = qkv.shape
        view = cache.descriptor()
        q_heads = width // view.head_dim - 2 * view.kv_heads
        assert tokens == batch.token_count and tables.rotary_dim <= view.head_dim
        assert q_heads > 0 and width == (q_heads + 2 * view.kv_heads) * view.head_dim
        self.context.run(
            library.RopeWriteCall(
                qkv=address(qkv),
                stride=width,
                q_heads=q_heads,
                rotary_dim=tables.rotary_dim,
                cosines=address(tables.cosines),
                sines=address(tables.sines),
                q_norm=address(norms.query if norms else None),
                k_norm=address(norms.key if norms else None),
                epsilon=norms.epsilon if norms else 0.0,
                cache=pointer(view),
                batch=pointer(describe(batch)),
            )
        )

    def attention(
        self,
        queries: torch.Tensor,
        cache: PagedCache,
        batch: StepBatch,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of `queries` [T, q_heads, head_dim] over the paged context.

        Rows of `queries` may be strided (a slice of qkv). `window`: positions attended to, the
        own one included. `out` [T, q_heads, head_dim]. Every position attended to must have been
        written.
        """
        tokens, q_heads, head_dim = queries.shape
        view = cache.descriptor()
        assert queries.dtype == torch.float32 and queries.stride()[1:] == (head_dim, 1)
        assert tokens == batch.token_count and head_dim == view.head_dim
        assert head_dim % self.context.head_dim_multiple == 0 and head_dim <= MAX_HEAD_DIM
        assert q_heads % view.kv_heads == 0 and out.shape == queries.shape
        assert window is None or window > 0
        self.context.run(
            library.AttentionCall(
                queries=queries.data_ptr(),
                query_stride=queries.stride(0),
                out=address(out),
                out_stride=q_heads * head_dim,
                q_heads=q_heads,
                window=window or 0,
                scale=scale,
                cache=pointer(view),
                batch=pointer(describe(batch)),
            )
        )
        return out

    def close(self) -> None:
        """Ends the context's threads."""
        self.context.close()


def instruction_set_for(head_dim: int, multiples: Mapping[InstructionSet, int]) -> InstructionSet:
    """The best set whose vectors fill a head, of those that a head must be a multiple of.

    Raises KernelsUnavailable if none does.
    """
    fitting = [each for each, multiple in multiples.items() if head_dim % multiple == 0]
    if not fitting or head_dim > MAX_HEAD_DIM:
        raise KernelsUnavailable(
            f"head_dim {head_dim} is not a multiple of {min(multiples.values())} up to "
            f"{MAX_HEAD_DIM}"
        )
    return max(fitting, key=lambda each: each.value)

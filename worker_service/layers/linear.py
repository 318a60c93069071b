"""Dense projections y = x Wᵀ + b, in the form the device runs fastest.

Holds weights; knows nothing of models or files.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

# Weights are packed for this many rows. With it, and from two rows up, oneDNN mostly gives each row
# the same bits whatever the number of rows: measured, not promised.
_PACKED_FOR_ROWS = 32


class Linear(Protocol):
    """A projection from [rows, in] to [rows, out]."""

    @property
    def byte_count(self) -> int:
        """Memory of the weight and bias."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out], a new tensor of the weight's dtype. rows is at least 1."""
        ...


class DenseLinear:
    """torch's own product, for any device and dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def byte_count(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """float32 on the CPU: oneDNN over weights stored in its own blocked layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    @property
    def byte_count(self) -> int:
        weight = self._weight.numel() * self._weight.element_size()
        return int(weight) + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows == 1:
            # A single row would take another kernel, whose sums run in another order.
            x = x.expand(2, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return out[:rows]


def is_packed(device: torch.device, data_type: torch.dtype) -> bool:
    """Whether weights are kept in a packed copy, also where they could be shared."""
    return (
        device.type == "cpu"
        and data_type is torch.float32
        and torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, shared: bool) -> Linear:
    """A Linear over weight [out, in] and bias [out], repacked where that is faster.

    With `shared` it may go on using the weight's memory; else it keeps no hold of it.
    """
    if is_packed(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return DenseLinear(weight if shared else weight.clone(), bias)

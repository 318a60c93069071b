"""What of a decoder an adapter can change: every projection of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from worker_service.domain.adapters import AdaptedPart, AdapterLimits
from worker_service.model.memory import projections
from worker_service.model.share import DecoderShare
from worker_service.model.spec import DecoderSpec, ProjectionSpec

_SUFFIX = ".weight"
_VECTOR = 16  # floats in the widest vector


def adaptable_modules(spec: DecoderSpec) -> Mapping[str, tuple[int, int]]:
    """The outputs and inputs of each module, by its name."""
    return {
        _module(weight.name): (weight.stored_shape[0], weight.stored_shape[1])
        for projection in projections(spec)
        for weight in projection.weights
    }


def adapted_parts(projection: ProjectionSpec) -> tuple[AdaptedPart, ...]:
    """The modules that are stacked in a projection, or in a rank's share of it."""
    return tuple(_parts(projection))


def layer_parts(spec: DecoderSpec | DecoderShare) -> Sequence[tuple[Sequence[AdaptedPart], ...]]:
    """Those of each layer's four projections: qkv, output, gate and up, down."""
    return [
        (
            adapted_parts(layer.attention.qkv),
            adapted_parts(layer.attention.output),
            adapted_parts(layer.feed_forward.up),
            adapted_parts(layer.feed_forward.down),
        )
        for layer in spec.layers
    ]


def adapter_numbers(share: DecoderShare, limits: AdapterLimits) -> int:
    """Numbers in the slots of a rank, and in the adapter that is prepared for one of them."""
    if not limits.slot_count:
        return 0
    parts = (part for layer in layer_parts(share) for each in layer for part in each)
    width = sum(len(part.inputs) + len(part.outputs) for part in parts)
    return (limits.slot_count + 1) * limits.max_rank * width


def added_size(spec: DecoderSpec | DecoderShare, rank: int) -> int:
    """Numbers that are kept for a token while adapters add to a projection: what their matrices
    make of it before and after the second product. Vectors are filled up."""
    return max(
        sum(rank + _VECTOR + len(part.outputs) + _VECTOR for part in parts)
        for layer in layer_parts(spec)
        for parts in layer
    )


def _parts(projection: ProjectionSpec) -> Iterator[AdaptedPart]:
    first = 0
    for weight in projection.weights:
        outputs, inputs = weight.shape
        own = [range(outputs), range(inputs)]
        if weight.cut is not None:
            start = weight.cut.start
            own[weight.cut.axis] = range(start, start + weight.shape[weight.cut.axis])
        yield AdaptedPart(_module(weight.name), first, own[0], own[1])
        first += outputs


def _module(tensor: str) -> str:
    return tensor.removesuffix(_SUFFIX)

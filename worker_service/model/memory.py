"""What a decoder will take, from its spec alone: counts of numbers, before any tensor is read."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from worker_service.model.share import DecoderShare
from worker_service.model.spec import DecoderSpec, ProjectionSpec


def parameter_count(spec: DecoderSpec | DecoderShare) -> int:
    """Numbers in all tensors; a tied head counts once, as the embedding."""
    return sum(prod(tensor.shape) for tensor in spec.tensors())


def table_size(spec: DecoderSpec | DecoderShare, length: int) -> int:
    """Numbers of the cosines and sines of `length` positions."""
    rope = spec.layers[0].attention.rope
    return 0 if rope is None else length * rope.rotary_dim


def projections(spec: DecoderSpec) -> Iterator[ProjectionSpec]:
    """Every projection of every layer; not the head."""
    for layer in spec.layers:
        attention, block = layer.attention, layer.feed_forward
        yield from (attention.qkv, attention.output, block.up, block.down)


def step_size(spec: DecoderSpec | DecoderShare, token_count: int, logit_count: int) -> int:
    """Numbers that a step of so many tokens and logits holds at once, in one layer and the head:
    the residual stream and two copies, queries, keys and values, what the heads read, what the
    feed-forward block widens to, and the logits."""
    layers = spec.layers
    attention = max(
        layer.attention.qkv.output_count + layer.attention.output.input_count for layer in layers
    )
    feed_forward = max(
        layer.feed_forward.up.output_count + layer.feed_forward.down.input_count for layer in layers
    )
    token = 3 * spec.hidden_size + attention + feed_forward
    return token_count * token + logit_count * (spec.hidden_size + spec.vocabulary_size)


def exchange_size(share: DecoderShare, token_count: int, logit_count: int) -> int:
    """Numbers that a step holds more because tensor ranks tell each other theirs: everybody's terms
    of a sum, and everybody's logits, padded, before they are put together."""
    rank, size = share.coordinates.tensor
    if size == 1:
        return 0
    terms = token_count * share.hidden_size * size
    if rank != 0 or share.head is None:
        return terms
    return max(terms, logit_count * len(share.vocabulary[0]) * size)

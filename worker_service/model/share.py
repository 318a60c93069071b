"""One rank's share of a decoder: which layers, heads, widths and vocabulary it computes.

What a tensor is for says how it is split, so a family says nothing about ranks. Query, key and
value rows go with their heads, a feed-forward block's rows with its width, embedding and head with
the vocabulary; the projection behind each is split by its inputs, and the ranks' results are added.
Norms are on every rank. Parts need not be equal: the first ranks take what is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from worker_service.attention.interface import LayerAttention
from worker_service.domain.capability import RankCoordinates
from worker_service.load_errors import RanksUnfit
from worker_service.model.spec import (
    AttentionSpec,
    Cut,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    ProjectionSpec,
    TensorSpec,
    tensors_in,
)


@dataclass(frozen=True, slots=True)
class DecoderShare:
    """What one rank holds and computes.

    `layers` are those from `first_layer` on, each with this rank's heads and width. `embedding` is
    on the ranks of the first stage, `final_norm` and `head` on those of the last; embedding and
    head have the rows that `vocabulary` gives, tensor rank by tensor rank.
    """

    coordinates: RankCoordinates
    hidden_size: int
    vocabulary: tuple[range, ...]
    first_layer: int
    layers: tuple[LayerSpec, ...]
    embedding: TensorSpec | None
    final_norm: NormSpec | None
    head: ProjectionSpec | None

    @property
    def vocabulary_size(self) -> int:
        """That of the model, all ranks' rows."""
        return self.vocabulary[-1].stop

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding that this rank has anyway."""
        return self.head is not None and self.head.weights == (self.embedding,)

    def tensors(self) -> frozenset[TensorSpec]:
        """Every tensor, or part of one, that the rank takes."""
        parts = (self.layers, self.embedding, self.final_norm, self.head)
        return frozenset(tensors_in(parts))


def share_of(spec: DecoderSpec, coordinates: RankCoordinates) -> DecoderShare:
    """The rank's share; with one rank the whole. Raises RanksUnfit where a rank would get none."""
    (rank, size), (stage, stages) = coordinates.tensor, coordinates.pipeline
    if len(spec.layers) < stages:
        raise RanksUnfit(
            f"the model's {len(spec.layers)} layers can't make {stages} stages: give a smaller "
            "--pipeline-parallel-size"
        )
    layers = part_of(len(spec.layers), stages, stage)
    vocabulary = tuple(part_of(spec.vocabulary_size, size, each) for each in range(size))
    own = vocabulary[rank]
    if not own:
        raise RanksUnfit(
            f"{spec.vocabulary_size} tokens can't be split over {size} tensor ranks: "
            "give a smaller --tensor-parallel-size"
        )
    embedding = _cut(spec.embedding, 0, own)
    head = ProjectionSpec((spec.embedding,)) if spec.head is None else spec.head
    return DecoderShare(
        coordinates=coordinates,
        hidden_size=spec.hidden_size,
        vocabulary=vocabulary,
        first_layer=layers.start,
        layers=tuple(_layer(spec.layers[index], rank, size) for index in layers),
        embedding=embedding if coordinates.is_first_stage else None,
        final_norm=spec.final_norm if coordinates.is_last_stage else None,
        head=_rows(head, (own,)) if coordinates.is_last_stage else None,
    )


def all_shares(spec: DecoderSpec, coordinates: RankCoordinates) -> Iterator[DecoderShare]:
    """The shares of the replica's ranks, in order. Raises RanksUnfit."""
    (_, size), (_, stages) = coordinates.tensor, coordinates.pipeline
    for stage in range(stages):
        for rank in range(size):
            yield share_of(
                spec, replace(coordinates, tensor=(rank, size), pipeline=(stage, stages))
            )


def part_of(count: int, size: int, rank: int) -> range:
    """A rank's part of `count` things in order; where it is uneven, the first have one more."""
    base, rest = divmod(count, size)
    start = rank * base + min(rank, rest)
    return range(start, start + base + (1 if rank < rest else 0))


def heads_of(heads: LayerAttention, rank: int, size: int) -> tuple[range, range]:
    """A tensor rank's query heads and KV heads.

    KV heads are split as far as there are any, each with its query heads. Where there are more
    ranks than KV heads, ranks that share one have copies of its KV, and split its query heads.
    Raises RanksUnfit.
    """
    kv_count, group = heads.kv_head_count, heads.head_count // heads.kv_head_count
    if size <= kv_count:
        own = part_of(kv_count, size, rank)
        return range(own.start * group, own.stop * group), own
    sharing, rest = divmod(size, kv_count)
    if rest or sharing > group:
        raise RanksUnfit(
            f"{heads.head_count} query heads over {kv_count} KV heads can't be split over {size} "
            f"tensor ranks: --tensor-parallel-size can be at most {kv_count}, or a multiple of "
            f"{kv_count} up to {heads.head_count}"
        )
    head = rank // sharing
    own = part_of(group, sharing, rank % sharing)
    return range(head * group + own.start, head * group + own.stop), range(head, head + 1)


def _layer(layer: LayerSpec, rank: int, size: int) -> LayerSpec:
    return replace(
        layer,
        attention=_attention(layer.attention, rank, size),
        feed_forward=_feed_forward(layer.feed_forward, rank, size),
    )


def _attention(spec: AttentionSpec, rank: int, size: int) -> AttentionSpec:
    heads, dim = spec.heads, spec.heads.head_dim
    queries, kvs = heads_of(heads, rank, size)
    query_rows, kv_rows = _scaled(queries, dim), _scaled(kvs, dim)
    keys = heads.head_count * dim
    values = keys + heads.kv_head_count * dim
    return replace(
        spec,
        heads=replace(heads, head_count=len(queries), kv_head_count=len(kvs)),
        qkv=_rows(spec.qkv, (query_rows, _moved(kv_rows, keys), _moved(kv_rows, values))),
        output=_inputs(spec.output, query_rows, rank),
    )


def _feed_forward(spec: FeedForwardSpec, rank: int, size: int) -> FeedForwardSpec:
    own = part_of(spec.intermediate_size, size, rank)
    if not own:
        raise RanksUnfit(
            f"a feed-forward block of {spec.intermediate_size} numbers can't be split over {size} "
            "tensor ranks: give a smaller --tensor-parallel-size"
        )
    wanted = (own, _moved(own, spec.intermediate_size)) if spec.gated else (own,)
    return replace(
        spec,
        intermediate_size=len(own),
        up=_rows(spec.up, wanted),
        down=_inputs(spec.down, own, rank),
    )


def _rows(projection: ProjectionSpec, wanted: Sequence[range]) -> ProjectionSpec:
    """Some of the stacked rows, in the order of `wanted`."""
    return ProjectionSpec(
        tuple(_stacked(projection.weights, wanted)), tuple(_stacked(projection.biases, wanted))
    )


def _stacked(tensors: Sequence[TensorSpec], wanted: Iterable[range]) -> Iterator[TensorSpec]:
    """The parts of tensors, stacked along their first axis, that are in the ranges."""
    for rows in wanted:
        start = 0
        for tensor in tensors:
            end = start + tensor.shape[0]
            first, last = max(rows.start, start), min(rows.stop, end)
            if first < last:
                yield _cut(tensor, 0, range(first - start, last - start))
            start = end


def _inputs(projection: ProjectionSpec, wanted: range, rank: int) -> ProjectionSpec:
    """Some of the inputs. The bias is added once, by the first tensor rank."""
    weights = tuple(_cut(weight, 1, wanted) for weight in projection.weights)
    return ProjectionSpec(weights, projection.biases if rank == 0 else ())


def _cut(tensor: TensorSpec, axis: int, part: range) -> TensorSpec:
    size = tensor.shape[axis]
    if len(part) == size:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = len(part)
    return TensorSpec(tensor.name, tuple(shape), Cut(axis, part.start, size))


def _scaled(part: range, by: int) -> range:
    return range(part.start * by, part.stop * by)


def _moved(part: range, by: int) -> range:
    return range(part.start + by, part.stop + by)

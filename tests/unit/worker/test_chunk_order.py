"""Chunks of a stream: tensors without numbers have none, wherever they stand."""

from __future__ import annotations

import hashlib
from itertools import product

import pytest

from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import TensorChunk, TensorDescription
from worker_service.weights.chunks import ChunkOrder


@pytest.mark.parametrize("counts", list(product((0, 1, 3), repeat=4)))
def test_empty_tensors_are_whole_when_their_turn_comes(counts: tuple[int, ...]) -> None:
    tensors = [TensorDescription(f"t{n}", "F32", (count,)) for n, count in enumerate(counts)]
    order = ChunkOrder(tensors)
    data = [bytes([n]) * 4 * count for n, count in enumerate(counts)]
    last = max((n for n, each in enumerate(data) if each), default=None)
    for index, each in enumerate(data):
        if index == last:
            with pytest.raises(SourceLost):
                order.finish()
        if each:
            order.take(TensorChunk(index, 0, each))
    with pytest.raises(UpdateInvalid):
        order.take(TensorChunk(len(counts) - 1, 0, b"1234"))
    found = order.finish()
    digests = [hashlib.sha256(each).digest() for each in data]
    assert [each.sha256 for each in found.values()] == digests


def test_an_empty_tensor_with_another_digest_is_refused() -> None:
    tensor = TensorDescription("t", "F32", (0,), b"x" * 32)
    with pytest.raises(UpdateInvalid):
        ChunkOrder([tensor]).finish()

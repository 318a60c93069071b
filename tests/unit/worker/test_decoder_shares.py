"""Shares of a decoder: together they are the whole, and what they compute together is the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.loaded_decoder import Loaded
from tests.support.quick import examples
from tests.support.threaded_ranks import Exchange, ThreadedPeers
from tests.support.tiny_spec import save_random, tiny_spec, with_head_norms
from worker_service.attention.interface import LayerAttention
from worker_service.domain.capability import RankCoordinates
from worker_service.load_errors import LoadError, RanksUnfit
from worker_service.model.loader import WeightLoader
from worker_service.model.share import DecoderShare, all_shares, heads_of, part_of, share_of
from worker_service.model.spec import TensorSpec
from worker_service.weights.checkpoint import Checkpoint

CLOSE = 1e-4
LAYOUTS = [(1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (4, 1)]


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_each_rank() -> Iterator[None]:
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """config.json of small decoders of every family, with heads and widths that split unevenly."""
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    family = draw(st.sampled_from(("Llama", "Qwen2", "Mistral")))
    config: dict[str, Any] = {
        "architectures": [f"{family}ForCausalLM"],
        "vocab_size": draw(st.integers(4, 70)),
        "hidden_size": draw(st.sampled_from((16, 24, 48))),
        "intermediate_size": draw(st.integers(4, 60)),
        "num_hidden_layers": draw(st.integers(1, 5)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from((4, 8))),
        "max_position_embeddings": 160,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "Llama":
        config["attention_bias"] = config["mlp_bias"] = draw(st.booleans())
    if family == "Mistral":
        config["sliding_window"] = draw(st.sampled_from((None, 5)))
    return config


@settings(max_examples=examples(150), deadline=None)
@given(configs(), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_the_shares_are_the_whole(
    config: dict[str, Any], tensor: int, pipeline: int, normed: bool
) -> None:
    """Each number of each tensor is on one rank, but for KV that more ranks need, and for norms."""
    spec = tiny_spec(**config)
    if normed:
        spec = with_head_norms(spec)
    place = RankCoordinates(tensor=(0, tensor), pipeline=(0, pipeline))
    kv_heads, heads = config["num_key_value_heads"], config["num_attention_heads"]
    fits = tensor <= kv_heads or (tensor % kv_heads == 0 and tensor <= heads)
    least = min(config["vocab_size"], config["intermediate_size"])
    if not fits or tensor > least or pipeline > config["num_hidden_layers"]:
        with pytest.raises(RanksUnfit):
            list(all_shares(spec, place))
        return
    shares = list(all_shares(spec, place))
    copies = max(1, tensor // kv_heads)
    counted: Counter[tuple[str, int]] = Counter()
    for share in shares:
        for part in share.tensors():
            counted.update((part.name, number) for number in numbers_of(part))
    for whole in spec.tensors():
        name = whole.name
        expected = {1}
        if "norm" in name:
            expected = {tensor}
        elif ".k_proj." in name or ".v_proj." in name:
            expected = {copies}
        elif name == spec.embedding.name and spec.head is None and pipeline > 1:
            expected = {2}  # in the first stage and, as the head, in the last
        found = {counted[name, number] for number in range(math.prod(whole.shape))}
        assert found == expected, name
    assert sum(len(share.layers) for share in shares) == tensor * len(spec.layers)


@settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(configs(), st.sampled_from(LAYOUTS), st.data())
def test_shares_compute_what_the_whole_does(
    tmp_path: Path, config: dict[str, Any], layout: tuple[int, int], data: st.DataObject
) -> None:
    """Stages alone change no bit. Chunks, and logits of any positions."""
    tensor, pipeline = layout
    spec = tiny_spec(**config)
    try:
        exchange = Exchange(tensor, pipeline)
        shares = [share_of(spec, place) for place in exchange.ranks]
    except RanksUnfit:
        return
    folder = save_random(spec, tmp_path / "model")
    whole = Loaded(folder, spec=spec)
    ranks = [
        Loaded(folder, spec=spec, peers=ThreadedPeers(exchange, index))
        for index in range(len(shares))
    ]
    start = 0
    for length in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=2)):
        tokens = np.random.default_rng(start).integers(0, spec.vocabulary_size, length).tolist()
        wanted = data.draw(st.lists(st.integers(0, length - 1), max_size=3, unique=True))
        wanted.sort()
        expected = whole.run(tokens, start, wanted)
        results = exchange.run(lambda index: ranks[index].run(tokens, start, wanted))  # noqa: B023
        answer = results[exchange.ranks[0].answering_rank]
        assert answer.shape == expected.shape
        assert torch.allclose(answer, expected, atol=CLOSE, rtol=CLOSE)
        if tensor == 1:
            assert torch.equal(answer, expected)
        assert sum(result.shape[0] for result in results) == len(wanted)
        start += length


def numbers_of(part: TensorSpec) -> Iterator[int]:
    """The places of a part's numbers in the whole tensor, counted row by row."""
    places = np.arange(math.prod(part.stored_shape)).reshape(part.stored_shape)
    if part.cut is not None:
        start = part.cut.start
        own = range(start, start + part.shape[part.cut.axis])
        places = places.take(own, axis=part.cut.axis)
    assert places.shape == part.shape
    yield from places.reshape(-1).tolist()


def test_one_rank_takes_the_tensors_as_they_are() -> None:
    spec = tiny_spec()
    share = share_of(spec, RankCoordinates())
    assert share.tensors() == spec.tensors()
    assert all(tensor.cut is None for tensor in share.tensors())
    assert (share.layers, share.embedding) == (spec.layers, spec.embedding)


def test_a_stack_in_one_tensor_is_cut_in_three() -> None:
    """A checkpoint may hold query, key and value in one tensor."""
    spec = tiny_spec(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    layer = spec.layers[0]
    fused = TensorSpec("qkv", (32, 16))
    attention = replace(layer.attention, qkv=replace(layer.attention.qkv, weights=(fused,)))
    spec = replace(spec, layers=(replace(layer, attention=attention), *spec.layers[1:]))
    own = share_of(spec, RankCoordinates(tensor=(1, 2))).layers[0].attention.qkv
    rows = [(part.cut.start, part.shape[0]) for part in own.weights if part.cut]
    assert rows == [(8, 8), (20, 4), (28, 4)]


@pytest.mark.parametrize("count", range(1, 40))
def test_parts_differ_by_one_at_most(count: int) -> None:
    for size in range(1, 9):
        parts = [part_of(count, size, rank) for rank in range(size)]
        assert [number for part in parts for number in part] == list(range(count))
        lengths = [len(part) for part in parts]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_the_default_models_heads_over_two_ranks() -> None:
    heads = LayerAttention(9, 3, 64, 0.125)
    assert heads_of(heads, 0, 2) == (range(6), range(2))
    assert heads_of(heads, 1, 2) == (range(6, 9), range(2, 3))


@pytest.mark.parametrize(("size", "possible"), [(4, False), (5, False), (6, True), (9, True)])
def test_more_ranks_than_kv_heads(size: int, possible: bool) -> None:
    heads = LayerAttention(9, 3, 64, 0.125)
    if not possible:
        with pytest.raises(RanksUnfit, match=r"at most 3, or a multiple of 3 up to 9"):
            heads_of(heads, 0, size)
        return
    parts = [heads_of(heads, rank, size) for rank in range(size)]
    assert [head for queries, _ in parts for head in queries] == list(range(9))
    assert all(len(kvs) == 1 for _, kvs in parts)
    assert all(query // 3 == kvs.start for queries, kvs in parts for query in queries)


def test_a_share_reads_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank maps a whole tensor that it has a part of."""
    spec = tiny_spec(num_attention_heads=4, num_key_value_heads=2)
    folder = save_random(spec, tmp_path)
    share: DecoderShare = share_of(spec, RankCoordinates(tensor=(1, 2)))
    with Checkpoint(folder) as checkpoint:
        whole: list[str] = []
        tensor = checkpoint.tensor
        monkeypatch.setattr(
            checkpoint, "tensor", lambda name, shape: whole.append(name) or tensor(name, shape)
        )
        loader = WeightLoader(checkpoint, share, torch.float32, torch.device("cpu"))
        for part in sorted(share.tensors(), key=lambda part: part.name):
            loaded = loader.tensor(part)
            assert loaded.shape == part.shape
            stored = tensor(part.name, part.stored_shape)
            if part.cut is not None:
                stored = stored.narrow(part.cut.axis, part.cut.start, part.shape[part.cut.axis])
            assert torch.equal(loaded, stored)
        loader.finish()
    assert whole and all("norm" in name for name in whole)


def test_a_part_of_a_tensor_with_another_shape_is_refused(tmp_path: Path) -> None:
    folder = save_random(tiny_spec(), tmp_path)
    with Checkpoint(folder) as checkpoint, pytest.raises(LoadError, match="has shape"):
        checkpoint.part("model.embed_tokens.weight", (33, 16), 0, range(4))
    with Checkpoint(folder) as checkpoint, pytest.raises(LoadError, match="lack the tensor"):
        checkpoint.part("model.nothing", (33, 16), 0, range(4))

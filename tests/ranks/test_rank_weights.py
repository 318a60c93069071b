"""Ranks that have taken other weights compute what ranks do that were started with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import runner_rig, tiny_llama
from tests.support.rank_processes import Rank, Replica
from tests.support.weight_updates import from_disk, streamed, tensors_in, two_models
from worker_service.domain.weights import Placement

pytestmark = pytest.mark.slow

COUNT = 12


def outputs(replica: Replica) -> list[list[int]]:
    return runner_rig.generate(replica, tiny_llama.PROMPTS, COUNT, chunk=16)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_each_rank_takes_its_part(
    tensor: int, pipeline: int, tied: bool, rank_pool: list[Rank], tmp_path: Path
) -> None:
    """From whole tensors, whichever way they come; the versions are one again after each."""
    old, new = two_models(tmp_path, tie_word_embeddings=tied)
    expected = {}
    for folder in (old, new):
        fresh = Replica.load(rank_pool, folder, tensor, pipeline)
        expected[folder] = outputs(fresh)
        digest = fresh.capability().weight_version.digest
    assert expected[old] != expected[new]
    replica = Replica.load(rank_pool, old, tensor, pipeline, weights_root=tmp_path)
    ways = [
        (new, from_disk("new"), None),
        (old, streamed(tensors_in(old), placement=Placement.IN_PLACE), old),
        (new, streamed(tensors_in(new), is_partial=True), new),
        (old, from_disk("old", placement=Placement.IN_PLACE), None),
        (new, from_disk("new", expected_digest=digest), None),
    ]
    for generation, (folder, update, stream) in enumerate(ways, start=2):
        (version,) = replica.swap(update, stream)
        assert version.generation == generation
        assert (version.digest == digest) == (folder == new)
        assert outputs(replica) == expected[folder]


def test_a_rank_that_was_left_out_has_another_version(
    rank_pool: list[Rank], tmp_path: Path
) -> None:
    """By which its log refuses the next plan; see StepLog."""
    old, new = two_models(tmp_path)
    replica = Replica.load(rank_pool, old, 2, 1)
    replica.ranks[0].call("swap", streamed(tensors_in(new)), new)
    versions = [rank.call("capability").weight_version for rank in replica.ranks]
    assert [version.generation for version in versions] == [2, 1]
    assert versions[0].digest != versions[1].digest
    replica.ranks[1].call("swap", streamed(tensors_in(new)), new)
    assert outputs(replica) == outputs(Replica.load(rank_pool, new, 2, 1))

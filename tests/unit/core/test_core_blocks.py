"""The block pool and the prefix cache by themselves."""

from __future__ import annotations

import tracemalloc
from array import array

from control_plane.core.block_pool import BlockPool
from control_plane.core.plan import BlockId
from control_plane.core.prefix_cache import PrefixCache
from control_plane.core.request import SequenceId
from control_plane.core.sequence import Sequence
from tests.support.core_requests import request

SIZE = 2


def sequence_of(
    cache: PrefixCache, tokens: list[int], blocks: list[BlockId], salt: str = ""
) -> Sequence:
    """A sequence with all its tokens computed into these blocks."""
    asked = request("a", tokens, salt=salt)
    return Sequence(
        sequence_id=SequenceId(1),
        request=asked,
        prompt_count=len(tokens),
        scanner=None,
        rank=(0.0, 0.0, 0),
        token_ids=array("I", tokens),
        token_limit=100,
        cache_root=cache.root(salt),
        stop_ids=frozenset(),
        blocks=blocks,
        computed=len(tokens),
    )


def pool_of(block_count: int) -> tuple[PrefixCache, BlockPool]:
    cache = PrefixCache(SIZE, "digest", enabled=True)
    return cache, BlockPool(block_count, cache)


def test_the_null_block_is_never_handed_out() -> None:
    _, pool = pool_of(5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.free_count == 0 and pool.referenced_count == 4


def test_only_full_known_computed_blocks_are_registered() -> None:
    cache, pool = pool_of(9)
    sequence = sequence_of(cache, [1, 2, 3, 4, 5], pool.allocate(3))
    sequence.computed = 3
    cache.register(sequence)
    assert len(cache) == 1
    sequence.computed = 6  # one more is in flight, of a token nobody knows
    cache.register(sequence)
    assert [block in cache for block in sequence.blocks] == [True, True, False]


def test_a_lookup_follows_the_chain_and_leaves_the_last_token() -> None:
    cache, pool = pool_of(9)
    blocks = pool.allocate(3)
    cache.register(sequence_of(cache, [1, 2, 3, 4, 5, 6], blocks))
    cases: list[tuple[list[int], str, list[BlockId]]] = [
        ([1, 2, 3, 4, 5, 6, 7], "", blocks),
        ([1, 2, 3, 4, 5, 6], "", blocks[:2]),
        ([1, 2, 9, 9, 5, 6, 7], "", blocks[:1]),
        ([9, 2, 3, 4, 5], "", []),
        ([3, 4, 5, 6, 7], "", []),
        ([1, 2, 3, 4, 5], "other", []),
    ]
    for tokens, salt, hits in cases:
        assert cache.lookup(sequence_of(cache, tokens, [], salt)) == hits


def test_weights_salt_and_tokens_do_not_run_into_each_other() -> None:
    assert PrefixCache(SIZE, "b", True).root("a") != PrefixCache(SIZE, "", True).root("ab")
    cache = PrefixCache(SIZE, "w", True)
    assert cache.root("") != PrefixCache(SIZE, "v", True).root("")
    assert cache.root("\ud800") != cache.root("")


def test_the_least_recently_used_is_evicted_first_and_ends_before_beginnings() -> None:
    cache, pool = pool_of(6)
    old, new = pool.allocate(2), pool.allocate(2)
    cache.register(sequence_of(cache, [1, 2, 3, 4], old))
    cache.register(sequence_of(cache, [5, 6, 7, 8], new))
    pool.release(old)
    pool.release(new)
    assert (pool.free_count, pool.idle_count) == (5, 4)
    [blank] = pool.allocate(1)
    assert blank not in old + new and len(cache) == 4, "blank blocks go first"
    pool.share(old)  # a hit: no longer free
    pool.release(old)
    assert pool.allocate(2) == [new[1], new[0]]
    assert [block in cache for block in old + new] == [True, True, False, False]
    assert pool.allocate(1) == [old[1]]


def test_shared_blocks_outlive_one_holder() -> None:
    cache, pool = pool_of(4)
    blocks = pool.allocate(1)
    cache.register(sequence_of(cache, [1, 2], blocks))
    assert pool.count_idle(blocks) == 0
    pool.share(blocks)
    pool.release(blocks)
    assert pool.referenced_count == 1
    pool.release(blocks)
    assert (pool.referenced_count, pool.idle_count, pool.count_idle(blocks)) == (0, 1, 1)


def test_forgotten_blocks_become_blank() -> None:
    cache, pool = pool_of(4)
    blocks = pool.allocate(1)
    cache.register(sequence_of(cache, [1, 2], blocks))
    cache.forget(blocks[0])
    cache.forget(blocks[0])
    pool.release(blocks)
    assert (pool.idle_count, pool.free_count, cache.entries()) == (0, 3, [])


def test_disabled_the_cache_keeps_nothing() -> None:
    cache = PrefixCache(SIZE, "w", enabled=False)
    sequence = sequence_of(cache, [1, 2, 3], [BlockId(1), BlockId(2)])
    cache.register(sequence)
    assert cache.lookup(sequence) == [] and len(cache) == 0 and not sequence.block_hashes


def test_hashes_are_made_once() -> None:
    cache, pool = pool_of(9)
    sequence = sequence_of(cache, [1, 2, 3, 4, 5], pool.allocate(3))
    cache.lookup(sequence)
    first = sequence.block_hashes[0]
    sequence.computed = 5
    cache.register(sequence)
    assert len(sequence.block_hashes) == 2 and sequence.block_hashes[0] is first


def test_a_large_pool_that_is_not_used_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        _, pool = pool_of(1_000_000)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 10_000
    assert pool.free_count == 999_999
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.referenced_count == 3
    pool.release([BlockId(2)])
    assert pool.allocate(2) == [2, 4], "what was used before goes first"
    assert pool.free_count == 999_995
    pool.check([[BlockId(block) for block in (1, 3, 2, 4)]])

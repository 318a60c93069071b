"""Who holds which KV block: reference counts, blank blocks, and idle blocks that are still cached.

Blocks are freed and handed out again at once, even while plans in flight still use them. That is
safe because the worker executes plans in order: whatever an earlier plan reads or writes there is
done before the plan that gives the block to somebody else starts, and the new holder only reads
slots that it has written itself or that the prefix cache vouches for.
"""

from __future__ import annotations

from collections import OrderedDict

from control_plane.core.plan import NULL_BLOCK, BlockId
from control_plane.core.prefix_cache import PrefixCache


class BlockPool:
    """Every block but the null block is blank, idle (cached and unreferenced) or referenced."""

    def __init__(self, block_count: int, cache: PrefixCache) -> None:
        self._cache = cache
        self._block_count = block_count
        self._references = [0]
        """By block, of all that were ever handed out, and the null block."""
        self._blank: list[BlockId] = []
        """Without those that were never handed out: a large pool that is little used costs little.
        They are the blocks behind `_references`."""
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        """Least recently used first."""

    @property
    def free_count(self) -> int:
        """Blocks that can be handed out, idle ones included."""
        return self._block_count - len(self._references) + len(self._blank) + len(self._idle)

    @property
    def idle_count(self) -> int:
        return len(self._idle)

    @property
    def referenced_count(self) -> int:
        return self._block_count - 1 - self.free_count

    def allocate(self, count: int) -> list[BlockId]:
        """New blocks, one reference each: blank ones first, then the least recently used idle.

        The caller has checked `free_count`.
        """
        assert count <= self.free_count, f"{count} blocks wanted, {self.free_count} free"
        blocks: list[BlockId] = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            elif len(self._references) < self._block_count:
                block = BlockId(len(self._references))
                self._references.append(0)
            else:
                block, _ = self._idle.popitem(last=False)
                self._cache.forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def count_idle(self, blocks: list[BlockId]) -> int:
        """How many of the blocks nobody references: sharing those makes them unavailable."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: list[BlockId]) -> None:
        """One reference more for each of these cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: list[BlockId]) -> None:
        """One reference less for each block of a block table.

        The table's end becomes idle first: a prefix outlives what only makes sense behind it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._cache:
                    self._idle[block] = None
                else:
                    self._blank.append(block)

    def drop_since(self, step_id: int) -> None:
        """What this step and later ones wrote is not to be trusted: no hit shall find it."""
        for block in self._cache.drop_since(step_id):
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)

    def check(self, tables: list[list[BlockId]]) -> None:
        """Raises AssertionError unless the counts follow from these block tables."""
        references = [0] * len(self._references)
        for table in tables:
            for block in table:
                references[block] += 1
        assert references == self._references, "reference counts differ from the block tables"
        assert references[NULL_BLOCK] == 0, "the null block was handed out"
        free = self._blank + list(self._idle)
        unreferenced = [block for block in range(1, len(references)) if not references[block]]
        assert sorted(free) == unreferenced, "blocks lost, or free while in use"
        assert all(block in self._cache for block in self._idle), "an idle block is not cached"
        assert not any(block in self._cache for block in self._blank), "a blank block is cached"

"""Full KV blocks by what is in them, so that equal prefixes are computed once. Holds no counts.

A block's hash chains over everything its KV depends on: SHA-256 of the parent's hash and the
block's tokens, starting from a root over cache salt, weight digest and adapter digest (as vLLM's
hash-block cache, `vllm/v1/core/kv_cache_utils.py`). Equal hashes mean equal prefixes, so a lookup
never compares tokens, and sequences of different salts or adapters never meet.

A block enters the cache when its tokens are all known and the plan that writes its last slot has
been made. The worker may not have run that plan yet, and need not have: it runs plans in order, and
a hit is only read by a later one. The planner takes care of "later": what a plan computes is
registered when the plan is complete. Each entry remembers the step that wrote it, for the case that
the step's result never comes.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

from control_plane.core.plan import BlockId
from control_plane.core.sequence import Sequence

_MOST_COMPARED_BLOCKS = 1024


class PrefixCache:
    """Hash to block and back. Which cached block is evicted is the block pool's decision."""

    def __init__(self, block_size: int, weight_digest: str, enabled: bool) -> None:
        self._block_size = block_size
        self._weight_digest = weight_digest.encode()
        self._enabled = enabled
        self._block_of: dict[bytes, BlockId] = {}
        self._hash_of: dict[BlockId, bytes] = {}
        self._step_of: dict[BlockId, int] = {}
        """The last step that may have written a block; 0: one of an earlier claim."""

    def root(self, salt: str, adapter_digest: str = "") -> bytes:
        """What the hashes of this salt and adapter chain from. The lengths keep the parts apart."""
        if not self._enabled:
            return b""
        encoded, adapter = salt.encode("utf-8", "surrogatepass"), adapter_digest.encode()
        lengths = b"%d,%d:" % (len(encoded), len(adapter)) if adapter else b"%d:" % len(encoded)
        return sha256(lengths + encoded + adapter + self._weight_digest).digest()

    def lookup(self, sequence: Sequence) -> list[BlockId]:
        """The blocks that hold the sequence's longest cached prefix, its last token left out.

        The last token is always computed, for its logits. Nothing changes but the sequence's memo
        of its hashes.
        """
        hits: list[BlockId] = []
        if not self._enabled:
            return hits
        for index in range((len(sequence.token_ids) - 1) // self._block_size):
            block = self._block_of.get(self._hash(sequence, index))
            if block is None:
                break
            hits.append(block)
        return hits

    def hashes(self, token_ids: array[int], salt: str, adapter_digest: str = "") -> list[bytes]:
        """The hashes of a prompt's full blocks, its last token left out, for `find`.

        At most the first _MOST_COMPARED_BLOCKS: what is equal so far is worth finding.
        """
        hashes: list[bytes] = []
        if self._enabled:
            parent = self.root(salt, adapter_digest)
            count = min((len(token_ids) - 1) // self._block_size, _MOST_COMPARED_BLOCKS)
            for start in range(0, count * self._block_size, self._block_size):
                parent = _chained(parent, token_ids[start : start + self._block_size])
                hashes.append(parent)
        return hashes

    def find(self, hashes: list[bytes]) -> list[BlockId]:
        """The blocks that hold a prompt's leading blocks, as far as they are cached."""
        hits: list[BlockId] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def register(self, sequence: Sequence) -> None:
        """Offers the sequence's full, known and computed blocks that were not offered before.

        Drafts in flight are not counted as computed. Where two sequences computed the same prefix
        at once, the first one's block stays. Blocks that hold KV of other weights are not offered.
        """
        if not self._enabled or sequence.keeps_kv:
            return
        full = min(len(sequence.token_ids), sequence.computed) // self._block_size
        for index in range(sequence.registered, full):
            block_hash = self._hash(sequence, index)
            if block_hash not in self._block_of:
                block = sequence.blocks[index]
                self._block_of[block_hash] = block
                self._hash_of[block] = block_hash
                self._step_of[block] = sequence.last_step
        sequence.registered = max(sequence.registered, full)

    def chain_from(self, weight_digest: str) -> None:
        """Blocks are of other weights from now on. Those that are cached were forgotten before."""
        assert not self._hash_of, "blocks of other weights could be found"
        self._weight_digest = weight_digest.encode()

    def forget(self, block: BlockId) -> None:
        """The block's content is about to change, or not to be trusted. Unknown blocks are fine."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            del self._step_of[block]

    def drop_since(self, step_id: int) -> list[BlockId]:
        """Forgets what this step and later ones wrote; the rest is now of an earlier claim.

        Returns the blocks that were forgotten.
        """
        dropped = [block for block, step in self._step_of.items() if step >= step_id]
        for block in dropped:
            self.forget(block)
        self._step_of = dict.fromkeys(self._step_of, 0)
        return dropped

    def __contains__(self, block: BlockId) -> bool:
        return block in self._hash_of

    def __len__(self) -> int:
        return len(self._hash_of)

    def entries(self) -> list[tuple[bytes, BlockId]]:
        """All of them, for checks."""
        assert {block: key for key, block in self._block_of.items()} == self._hash_of
        assert self._step_of.keys() == self._hash_of.keys()
        return list(self._block_of.items())

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.block_hashes
        for missing in range(len(hashes), index + 1):
            parent = hashes[missing - 1] if missing else sequence.cache_root
            start = missing * self._block_size
            hashes.append(_chained(parent, sequence.token_ids[start : start + self._block_size]))
        return hashes[index]


def _chained(parent: bytes, token_ids: array[int]) -> bytes:
    return sha256(parent + token_ids.tobytes()).digest()

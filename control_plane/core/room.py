"""What a ledger has room for, and what it still has to compute. Nothing changes."""

from __future__ import annotations

from control_plane.core.ledger import Ledger
from control_plane.core.plan import BlockId


def can_start(ledger: Ledger, token_count: int, hits: list[BlockId]) -> bool:
    """Whether a waiting sequence of so many tokens, with these hits, finds its blocks free.

    One more stays free for every running sequence to grow into: with less, it would soon be
    preempted again.
    """
    wanted = -(-token_count // ledger.config.block_size) - len(hits)
    return wanted + len(ledger.running) <= ledger.pool.free_count - ledger.pool.count_idle(hits)


def backlog_token_count(ledger: Ledger) -> int:
    """Tokens of logs that are still to be computed, of those that wait and of those that run.

    Who began to run last ranks last, mostly: the rest is not looked through.
    """
    count = ledger.waiting.missing_token_count + ledger.adapters.missing_token_count
    for sequence in reversed(ledger.running.items):
        if sequence.caught_up:
            break
        count += max(0, len(sequence.token_ids) - sequence.computed)
    return count

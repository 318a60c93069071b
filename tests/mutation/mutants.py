"""The planted bugs: each is a slip that somebody could make, in one place of the control core."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PLANE = Path("control_plane")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, which stands once in `file` of a package of the control plane, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    package: str = "core"

    @property
    def path(self) -> Path:
        """The file, in the tree."""
        return PLANE / self.package / self.file

    def plant(self, tree: Path) -> None:
        """Changes the file in a copy of the tree. Raises ValueError unless `old` is there once."""
        path = tree / self.path
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


MUTANTS = (
    # Admission and order.
    Mutant(
        "longest-prompt", "admission.py", "max_sequence_token_count - 1", "max_sequence_token_count"
    ),
    Mutant("one-more-waits", "admission.py", "live_count >= self", "live_count > self"),
    Mutant(
        "limit-ignores-prompt",
        "admission.py",
        "min(prompt_count + max_tokens",
        "min(max_tokens + 1",
    ),
    Mutant(
        "priority-upside-down",
        "sequence.py",
        "return (request.priority +",
        "return (-request.priority +",
    ),
    Mutant(
        "ageing-forgotten",
        "sequence.py",
        "request.arrival / ageing_seconds",
        "0.0 * ageing_seconds",
    ),
    # The pool and the cache.
    Mutant(
        "release-in-order", "block_pool.py", "for block in reversed(blocks)", "for block in blocks"
    ),
    Mutant("evict-newest", "block_pool.py", "popitem(last=False)", "popitem(last=True)"),
    Mutant(
        "evicted-still-cached", "block_pool.py", "                self._cache.forget(block)\n", ""
    ),
    Mutant(
        "hash-without-parent",
        "prefix_cache.py",
        "sha256(parent + token_ids.tobytes())",
        "sha256(token_ids.tobytes())",
    ),
    Mutant(
        "hash-without-salt",
        "prefix_cache.py",
        "lengths + encoded + adapter",
        "lengths + adapter",
    ),
    Mutant("hash-without-weights", "prefix_cache.py", "adapter + self._weight_digest", "adapter"),
    Mutant("hash-without-adapter", "prefix_cache.py", "encoded + adapter + self", "encoded + self"),
    Mutant(
        "slot-of-a-row-given-away",
        "adapters.py",
        " and slot.removal_step <= answered_step_id",
        "",
    ),
    Mutant(
        "hit-takes-last-token",
        "prefix_cache.py",
        "(len(sequence.token_ids) - 1) // self._block_size",
        "len(sequence.token_ids) // self._block_size",
    ),
    Mutant(
        "registers-unknown",
        "prefix_cache.py",
        "min(len(sequence.token_ids), sequence.computed)",
        "sequence.computed",
    ),
    Mutant(
        "registers-uncomputed",
        "prefix_cache.py",
        "min(len(sequence.token_ids), sequence.computed)",
        "len(sequence.token_ids)",
    ),
    # Planning.
    Mutant(
        "hit-within-the-plan",
        "planner.py",
        "        self.chunks.append((sequence.row, sequence, start))\n",
        "        self.ledger.cache.register(sequence)\n",
    ),
    Mutant("budget-not-spent", "planner.py", "        self.budget -= end - start\n", ""),
    Mutant(
        "prompt-starves-the-rest",
        "planner.py",
        "most = max(1, budget - (len(running) - index - 1))",
        "most = budget",
    ),
    Mutant(
        "starts-while-tokens-fly",
        "planner.py",
        "if sequence is None or sequence.pending:",
        "if sequence is None:",
    ),
    Mutant(
        "kept-kv-is-offered",
        "prefix_cache.py",
        "if not self._enabled or sequence.keeps_kv:",
        "if not self._enabled:",
    ),
    Mutant(
        "hashes-of-old-weights",
        "switch.py",
        "        sequence.block_hashes.clear()\n",
        "",
    ),
    Mutant(
        "held-logits-of-old-weights",
        "switch.py",
        "if keep_kv and sequence.computed and not sequence.held:",
        "if keep_kv and sequence.computed:",
    ),
    Mutant(
        "tokens-of-nobody",
        "switch.py",
        "sequence.credited(ledger.weight_version)",
        "pass",
    ),
    Mutant(
        "starts-without-room-to-grow",
        "room.py",
        "return wanted + len(ledger.running) <= ledger.pool.free_count",
        "return wanted <= ledger.pool.free_count",
    ),
    Mutant(
        "samples-past-the-limit",
        "planner.py",
        "if start == sequence.token_limit - 1:",
        "if start == sequence.token_limit:",
    ),
    Mutant(
        "wrong-source-step",
        "planner.py",
        "add_distance(step_id - sequence.last_step)",
        "add_distance(1)",
    ),
    Mutant(
        "preempts-who-it-makes-room-for",
        "planner.py",
        "if len(ledger.running) <= index + 1:",
        "if len(ledger.running) <= index:",
    ),
    Mutant(
        "drafts-past-the-limit",
        "planner.py",
        "min(self.max_draft_count, room - 1, most - 1)",
        "min(self.max_draft_count, most - 1)",
    ),
    Mutant("drafts-off-budget", "planner.py", "self.budget -= 1 + draft_count", "self.budget -= 1"),
    Mutant(
        "open-start-said-exact",
        "planner.py",
        "ledger.open_step_count if sequence.ahead else 0",
        "0",
    ),
    Mutant(
        "blocks-for-the-least-start",
        "planner.py",
        "start, furthest = sequence.computed, sequence.computed + sequence.ahead",
        "start = furthest = sequence.computed",
    ),
    Mutant(
        "held-go-on",
        "planner.py",
        "                elif not sequence.held:\n",
        "                else:\n",
    ),
    Mutant(
        "removal-forgotten",
        "planner.py",
        "removed_rows, ledger.released_rows = ledger.released_rows, []",
        "removed_rows = []",
    ),
    Mutant(
        "turns-by-rank-alone",
        "turns.py",
        "    ready.sort(key=_last_step)  # among equals, the order stays\n",
        "",
    ),
    Mutant(
        "turn-without-room",
        "planner.py",
        "        if others and not self.columns.rows:  # those whose turn it is have no room\n",
        "        if False:\n",
    ),
    Mutant(
        "turns-however-far-ahead",
        "turns.py",
        "sequence for sequence in decoding if sequence.pending < MOST_PENDING",
        "sequence for sequence in decoding",
    ),
    # What results do.
    Mutant(
        "end-one-late",
        "ends.py",
        "End(index + 1, FinishReason.STOP)",
        "End(index + 2, FinishReason.STOP)",
    ),
    Mutant(
        "own-stop-token-unnamed",
        "ends.py",
        "FinishReason.STOP, token)",
        "FinishReason.STOP, None)",
    ),
    Mutant(
        "tokens-after-a-stop-string",
        "ends.py",
        "return End(count, FinishReason.STOP)",
        "return End(len(ids), FinishReason.STOP)",
    ),
    Mutant(
        "accepted-not-computed",
        "sequence.py",
        "self.computed += len(token_ids) - 1",
        "self.computed += 0",
    ),
    Mutant("drafts-stay-open", "sequence.py", "            self.ahead -= draft_count\n", ""),
    Mutant(
        "faulty-blocks-stay-cached",
        "ledger.py",
        "                self.cache.forget(block)\n",
        "                pass\n",
    ),
    Mutant(
        "over-still-counted", "ledger.py", "        del self.sequences[sequence.sequence_id]\n", ""
    ),
    # Losses.
    Mutant(
        "unanswered-blocks-trusted",
        "ledger.py",
        "self.pool.drop_since(self.answered_step_id + 1)",
        "self.pool.drop_since(self.last_step_id + 1)",
    ),
    Mutant(
        "lost-tokens-awaited",
        "sequence.py",
        "        self.pending = self.last_step = 0\n",
        "        self.last_step = 0\n",
    ),
    Mutant(
        "told-mask-lost",
        "sequence.py",
        "self.mask, self.sent_mask = self.sent_mask, None\n\n\n",
        "self.sent_mask = None\n\n\n",
    ),
    Mutant(
        "old-length-kept",
        "scheduler.py",
        "if len(sequence.token_ids) >= sequence.token_limit",
        "if len(sequence.token_ids) > sequence.token_limit",
    ),
    Mutant(
        "rewinds-too-little",
        "sequence.py",
        "min(self.computed, len(self.token_ids) - 1)",
        "self.computed",
    ),
    # Who is to blame, and what fits a message.
    Mutant(
        "strikes-for-ever",
        "suspicion.py",
        "            _clear(sequence)\n            sequence.strike_mark = reached",
        "            sequence.strike_mark = reached",
    ),
    Mutant(
        "any-result-is-progress",
        "suspicion.py",
        "if reached > sequence.strike_mark:",
        "if reached != sequence.strike_mark:",
    ),
    Mutant("neighbours-are-accused", "suspicion.py", "_live(named or members)", "_live(members)"),
    Mutant(
        "suspects-in-company",
        "planner.py",
        "        if sequence is not suspect:\n            ledger.preempt(sequence)\n",
        "        pass\n",
    ),
    Mutant(
        "suspects-while-others-fly",
        "planner.py",
        "        if ledger.inflight:\n            return None\n        suspect",
        "        suspect",
    ),
    Mutant(
        "suspect-for-ever", "ledger.py", "self.suspects.pop(sequence.sequence_id, None)", "pass"
    ),
    Mutant(
        "adds-without-bound",
        "planner.py",
        "+ len(sequence.token_ids) > most_added",
        "> 10 * most_added",
    ),
)

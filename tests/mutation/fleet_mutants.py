"""The planted bugs of the fleet: where sequences go, how they move, and who runs them."""

from __future__ import annotations

from tests.mutation.mutants import Mutant

FLEET_MUTANTS = (
    # How one sequence leaves a core and comes to another.
    Mutant("withdrawn-uncounted", "ledger.py", "        self.counters.moved_out += 1\n", ""),
    Mutant("adopted-uncounted", "ledger.py", "        self.counters.moved_in += 1\n", ""),
    Mutant(
        "adopted-keeps-its-old-limit",
        "ledger.py",
        "        sequence.token_limit = self.admission.token_limit(\n"
        "            sequence.prompt_count, request.stop.max_tokens\n"
        "        )\n",
        "",
    ),
    Mutant(
        "departs-with-its-row",
        "sequence.py",
        "        copied.vacated(SequenceState.WAITING)\n",
        "",
    ),
    Mutant("departs-and-still-awaits", "sequence.py", "        copied.lost()\n", ""),
    Mutant(
        "hashes-of-another-block-size",
        "ledger.py",
        "        sequence.block_hashes.clear()\n",
        "",
    ),
    Mutant(
        "strikes-stay-behind",
        "suspicion.py",
        "    if sequence.strikes >= SUSPECT_STRIKES:\n        ledger.suspects",
        "    if sequence.strikes > 99:\n        ledger.suspects",
    ),
    Mutant(
        "crossing-untold",
        "scheduler.py",
        "arithmetic_changed and sequence.completion_count > 0\n        suspicion.meet",
        "False\n        suspicion.meet",
    ),
    Mutant(
        "crossing-told-to-whoever-waits",
        "scheduler.py",
        "arithmetic_changed and sequence.completion_count > 0\n        suspicion.meet",
        "arithmetic_changed\n        suspicion.meet",
    ),
    # Where it should go.
    Mutant(
        "lost-is-present",
        "fleet.py",
        "_PRESENT = (MemberState.ATTACHED, MemberState.SUSPECT)",
        "_PRESENT = (MemberState.ATTACHED, MemberState.SUSPECT, MemberState.LOST)",
    ),
    Mutant(
        "lost-takes-nothing",
        "fleet.py",
        "_TAKING = (*_PRESENT, MemberState.LOST, MemberState.DRAINING)",
        "_TAKING = _PRESENT",
    ),
    Mutant(
        "trials-have-company",
        "fleet.py",
        "bool(ledger.free_rows) and not (ledger.suspects or self.is_held)",
        "bool(ledger.free_rows) and not self.is_held",
    ),
    Mutant(
        "a-place-behind-a-queue",
        "fleet.py",
        "len(ledger.free_rows) > len(ledger.waiting) and",
        "bool(ledger.free_rows) and",
    ),
    Mutant(
        "cut-short-where-it-is-empty",
        "fleet.py",
        "    found.sort(key=lambda member: member.traits.max_sequence_token_count < wanted)\n",
        "",
    ),
    Mutant(
        "evacuates-to-itself",
        "fleet.py",
        "member.is_present and member.number != source.number]",
        "member.is_present]",
    ),
    Mutant(
        "evacuates-to-the-lost",
        "fleet.py",
        "if member.is_present and member.number != source.number]",
        "if member.number != source.number]",
    ),
    Mutant(
        "crosses-though-it-need-not",
        "fleet.py",
        "for alike in (_has_weights_of, _rounds_alike):",
        "for alike in (_has_weights_of,):",
    ),
    Mutant(
        "relief-without-blocks",
        "fleet.py",
        "    if best is None or not idle.would_start(len(best[0].token_ids)):",
        "    if best is None:",
    ),
    Mutant(
        "relief-of-the-last", "fleet.py", "first.rank < best[0].rank", "first.rank > best[0].rank"
    ),
    Mutant(
        "relief-of-whose-tokens-fly",
        "fleet.py",
        "        if sequence.pending:\n            continue",
        "        if False:\n            continue",
    ),
    Mutant(
        "relief-of-suspects",
        "fleet.py",
        "if sequence.sequence_id in source.core.ledger.suspects and (",
        "if False and (",
    ),
    Mutant(
        "relief-of-who-starts-anyway",
        "fleet.py",
        "[] if source.queue_moves else",
        "[] if not source else",
    ),
    Mutant(
        "relief-of-nobody",
        "fleet.py",
        "        return not waiting or (\n",
        "        return (\n",
    ),
    Mutant(
        "goes-where-it-is-cut",
        "fleet.py",
        "after.max_sequence_token_count >= sequence.token_limit",
        "after.max_sequence_token_count >= len(sequence.token_ids)",
    ),
    Mutant(
        "goes-where-it-can-not",
        "fleet.py",
        "succession.obstacle_of(sequence, before, after, may_cross=may_cross) is None",
        "after is not None",
    ),
    Mutant("lost-before-attached", "placement.py", "            not load.attached,\n", ""),
    Mutant("queues-where-it-could-start", "placement.py", "            not load.starts,\n", ""),
    Mutant("hits-count-for-nothing", "placement.py", " - load.cached_token_count", ""),
    Mutant(
        "fullest-first",
        "placement.py",
        "            -load.free_kv_tokens,",
        "            load.free_kv_tokens,",
    ),
    Mutant(
        "busiest-first",
        "placement.py",
        "+ _RUNNING_TOKENS * load.running",
        "- _RUNNING_TOKENS * load.running",
    ),
    Mutant(
        "other-weights-go-on",
        "succession.py",
        "if begun and not (same_weights and same_vocabulary):",
        "if begun and not same_vocabulary:",
    ),
    Mutant(
        "crosses-unasked",
        "succession.py",
        "if begun and after.arithmetic != before.arithmetic and not may_cross:",
        "if begun and after.arithmetic != before.arithmetic and not after:",
    ),
    # Who moves it, and when.
    Mutant(
        "grace-for-ever", "moves.py", "_GRACE_SECONDS = 0.25", "_GRACE_SECONDS = 250.0", "shell"
    ),
    Mutant("no-grace", "moves.py", "_GRACE_SECONDS = 0.25", "_GRACE_SECONDS = 0.0", "shell"),
    Mutant("timers-outlive-the-fleet", "moves.py", ".popitem()[1].cancel()", ".popitem()", "shell"),
    Mutant(
        "attached-and-still-evacuated",
        "moves.py",
        "if (grace := self._graces.pop(replica, None)) is not None:\n            grace.cancel()",
        "if (grace := self._graces.pop(replica, None)) is None:\n            pass",
        "shell",
    ),
    Mutant(
        "newcomers-take-nothing",
        "moves.py",
        "if other.state in _AWAY and (other.life.is_replaced or other not in self._graces):",
        "if not other:",
        "shell",
    ),
    Mutant(
        "moves-untold",
        "moves.py",
        "        self._register.moved(move.sequence_id, target)\n",
        "",
        "shell",
    ),
    Mutant(
        "queue-relieved-by-one",
        "exchange.py",
        "if self._free and (not member.queue_moves or member.core.ledger.adapters.queues):",
        "if not self:",
    ),
    Mutant("target-sleeps", "replica.py", "        other._pipeline.wake()\n", "", "shell"),
    Mutant(
        "gives-up-before-it-moves",
        "replica.py",
        "            self._listener.evacuate(self)\n            tell_given_up",
        "            tell_given_up",
        "shell",
    ),
    Mutant(
        "leaves-with-what-runs",
        "replica.py",
        "return has_work or _sequence_count(self.stats()) > 0",
        "return False",
        "shell",
    ),
    Mutant(
        "kv-of-the-dead-kept",
        "replica.py",
        "self.ended_by in DISCONNECTING and attachment.has_kv_of(last)",
        "attachment.has_kv_of(last)",
        "shell",
    ),
    Mutant(
        "same-process-twice",
        "roster.py",
        "if here == info.incarnation_id:",
        "if here == info.worker_id:",
        "shell",
    ),
    Mutant(
        "other-weights-serve",
        "roster.py",
        "if digests[0] != digests[1] and not self._served_weights.is_decided:",
        "if not known:",
        "shell",
    ),
    Mutant(
        "gone-and-still-listed",
        "roster.py",
        "                        del self._by_number[replica.number]\n",
        "",
        "shell",
    ),
    Mutant("joined-and-never-run", "roster.py", "        self._joined.set()\n", "", "shell"),
    Mutant(
        "register-names-the-old-place",
        "register.py",
        "        self._sequences[sequence_id].replica = target\n",
        "        pass\n",
        "shell",
    ),
    Mutant(
        "never-empty-again",
        "register.py",
        "        if not self.requests:\n            self.empty.set()",
        "        pass",
        "shell",
    ),
    Mutant(
        "ready-while-it-drains",
        "fleet.py",
        "return self._accepting and any(",
        "return any(",
        "shell",
    ),
    Mutant("reserved-for-nobody", "fleet.py", "<= self._reserved_count:", "<= 0:", "shell"),
    Mutant("turns-untold", "pipeline.py", "            self._took_turn()\n", "", "shell"),
    Mutant(
        "results-of-the-claim-before", "pipeline.py", "        self._inbox.clear()\n", "", "shell"
    ),
)

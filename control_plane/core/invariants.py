"""What must hold between any two calls to the scheduler. For tests, and for when it is idle."""

from __future__ import annotations

from collections import Counter

from control_plane.core.ledger import Ledger
from control_plane.core.scheduler import Scheduler
from control_plane.core.sequence import NO_ROW, Sequence, SequenceState
from control_plane.core.spans import token_count


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError that says which books do not balance. Takes time linear in the pool."""
    ledger = scheduler.ledger
    _check_lists(ledger)
    _check_spans(ledger)
    _check_rows(ledger)
    _check_inflight(ledger)
    for sequence in [*ledger.waiting, *ledger.parked.values(), *ledger.adapters.awaiting()]:
        _check_waiting(sequence)
    for sequence in ledger.running:
        _check_running(ledger, sequence)
    ledger.adapters.check(ledger.running.items)
    _check_blocks(ledger)
    _check_counters(scheduler)


def _check_lists(ledger: Ledger) -> None:
    for kind, ranked in (("waiting", ledger.waiting.items), ("running", ledger.running.items)):
        ranks = [sequence.rank for sequence in ranked]
        assert ranks == sorted(set(ranks)), f"{kind} sequences are out of order"
    awaiting = list(ledger.adapters.awaiting())
    listed = [*ledger.waiting, *ledger.running, *ledger.parked.values(), *awaiting]
    assert len(listed) == len(ledger.sequences), "a live sequence is in no list, or in two"
    for sequence in listed:
        name = sequence.sequence_id
        assert ledger.sequences.get(name) is sequence, f"{name} is listed but not live"
    for sequence in ledger.parked.values():
        name = sequence.sequence_id
        assert sequence.holds and sequence.mask is None, f"{name} is parked, yet may be sampled"
    for sequence in ledger.waiting:
        digest = sequence.adapter_digest
        is_ready = not digest or ledger.adapters.is_ready(digest)
        assert is_ready and not sequence.awaits_adapter, "waits for a row without its adapter"
    kept = {name: one for name, one in ledger.sequences.items() if one.keeps_kv}
    assert kept == ledger.kept, "who has KV of other weights is mistaken"
    for name, sequence in ledger.suspects.items():
        assert ledger.sequences.get(name) is sequence, f"{name} is a suspect but not live"
    ready = [
        sequence.sequence_id
        for sequence in ledger.running
        if sequence.held and sequence.mask is not None
    ]
    assert sorted(ready) == sorted(ledger.ready), "held sequences with masks are not the ready ones"


def _check_spans(ledger: Ledger) -> None:
    for name, sequence in ledger.sequences.items():
        covered, spans = token_count(sequence.spans), sequence.spans
        assert covered <= sequence.completion_count, f"{name}: more tokens are credited than it has"
        assert all(span.token_count > 0 for span in spans), f"{name}: an empty span"


def _check_rows(ledger: Ledger) -> None:
    used = [sequence.row for sequence in ledger.running]
    every = list(range(ledger.config.max_sequence_count))
    assert sorted(used + ledger.free_rows) == every, "rows lost, or held twice"
    released = set(ledger.released_rows)
    assert len(released) == len(ledger.released_rows), "a row is released twice"
    assert released <= set(ledger.free_rows), "a released row is in use before its removal"


def _check_inflight(ledger: Ledger) -> None:
    steps = [step for step in ledger.inflight if step.is_step]
    assert len(steps) == ledger.open_step_count, "open steps are miscounted"
    assert len(steps) <= ledger.config.max_inflight_step_count, "too many plans in flight"
    ids = [step.step_id for step in steps]
    last = ledger.last_step_id
    assert ids == list(range(last - len(ids) + 1, last + 1)), "steps in flight are not dense"
    pending = Counter(id(sequence) for step in ledger.inflight for sequence in step.sequences)
    drafts: Counter[int] = Counter()
    for step in steps:
        for sequence, count in zip(step.sequences, step.draft_counts, strict=False):
            drafts[id(sequence)] += count
    for sequence in ledger.sequences.values():
        name = sequence.sequence_id
        expected = pending[id(sequence)] + sequence.held
        assert sequence.pending == expected, f"{name}: pending tokens miscounted"
        if sequence.state is SequenceState.RUNNING:
            assert sequence.ahead == drafts[id(sequence)], f"{name}: drafts miscounted"
        sent = [step for step in ledger.inflight if not step.is_step]
        is_sent = any(sequence in step.sequences for step in sent)
        assert is_sent == (sequence.sent_mask is not None), f"{name}: a mask is sent, or is not"


def _check_waiting(sequence: Sequence) -> None:
    name = sequence.sequence_id
    assert sequence.state is SequenceState.WAITING, f"{name} waits in state {sequence.state}"
    assert sequence.row == NO_ROW and not sequence.blocks, f"{name} waits with a row or blocks"
    assert sequence.computed == 0 == sequence.ahead, f"{name} waits with computed tokens"
    assert not (sequence.caught_up or sequence.steady), f"{name} waits, yet decodes"
    assert not sequence.held, f"{name} waits, yet is held"
    assert len(sequence.token_ids) < sequence.token_limit, f"{name} should be over"


def _check_running(ledger: Ledger, sequence: Sequence) -> None:
    name, block_size = sequence.sequence_id, ledger.config.block_size
    known, computed = len(sequence.token_ids), sequence.computed
    total, furthest = known + sequence.pending, computed + sequence.ahead
    assert sequence.state is SequenceState.RUNNING, f"{name} runs in state {sequence.state}"
    assert known < sequence.token_limit, f"{name} should be over"
    assert total + sequence.ahead <= sequence.token_limit, f"{name} samples beyond its limit"
    held = len(sequence.blocks) * block_size
    assert sequence.capacity == held, f"{name}: capacity differs from its blocks"
    assert furthest <= held, f"{name} computes beyond its blocks"
    drafts = ledger.config.max_draft_token_count * ledger.config.max_inflight_step_count
    assert held - furthest < block_size + drafts or not computed, f"{name} holds spare blocks"
    if sequence.caught_up:
        assert computed == total - 1, f"{name} has caught up, yet lacks more than a token"
    else:
        assert not sequence.pending and computed < known, f"{name} has not caught up, yet sampled"
    steady = sequence.caught_up and not sequence.holds and not ledger.config.max_draft_token_count
    assert sequence.steady == steady, f"{name} is steady, or should be"
    assert not sequence.held or (sequence.holds and sequence.caught_up), f"{name} is held"
    full = min(known, computed) // block_size
    assert sequence.registered <= full, f"{name} registered blocks that are not full"
    assert len(sequence.block_hashes) * block_size <= known, f"{name}: odd hashes"
    if sequence.keeps_kv:
        cached = [block for block in sequence.blocks if block in ledger.cache]
        assert not cached, f"{name}: its KV is of other weights, and {cached} can be found"


def _check_blocks(ledger: Ledger) -> None:
    ledger.pool.check([sequence.blocks for sequence in ledger.running])
    entries = ledger.cache.entries()
    hashes = dict(entries)
    for sequence in ledger.running:
        for index, block in enumerate(sequence.blocks[: sequence.registered]):
            if block in ledger.cache:
                name = sequence.sequence_id
                known = hashes.get(sequence.block_hashes[index])
                assert known == block, f"{name}: block {block} is cached under another hash"
        for block in sequence.blocks[sequence.registered :]:
            assert block not in ledger.cache, f"block {block} is cached and still being written"


def _check_counters(scheduler: Scheduler) -> None:
    stats, config = scheduler.stats(), scheduler.ledger.config
    live = stats.running + stats.waiting
    came, went = stats.submitted + stats.moved_in, sum(stats.finished.values()) + stats.moved_out
    assert came == live + went, "sequences lost"
    waiting = scheduler.ledger.waiting
    prompts = sum(sequence.prompt_count for sequence in waiting)
    assert waiting.prompt_token_count == prompts, "waiting prompts miscounted"
    missing = sum(sequence.missing for sequence in waiting)
    assert waiting.missing_token_count == missing, "what is missing changed in the queue"
    tokens = stats.kv_active_tokens + stats.kv_cached_tokens + stats.kv_free_tokens
    assert tokens == config.usable_block_count * config.block_size, "KV tokens lost"
    progress = sum(
        min(sequence.prompt_count, max(sequence.furthest, sequence.computed))
        for sequence in scheduler.ledger.sequences.values()
    )
    accounted = stats.prompt_tokens + stats.cached_prompt_tokens
    if not stats.moved_in:  # others' progress was counted where they were
        assert accounted >= progress, "prompt tokens computed but not counted"
    if not live:
        assert stats.kv_active_tokens == 0, "blocks are held though no request is live"

"""The core's face: what the shell tells it, asks it, and takes to the worker.

Pure: no clock, no I/O. Every method runs to completion at once, and between two of them the books
balance (invariants.py). planner.py decides what a step computes, update.py what its result means,
ledger.py keeps the books.
"""

from __future__ import annotations

from collections.abc import Mapping

from control_plane.core import planner, suspicion, switch, update
from control_plane.core.adapter_turns import AdapterTurns
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import Finish, FinishReason, SequenceOutput, Stats
from control_plane.core.ledger import Ledger
from control_plane.core.plan import Message, StepPlan, StepResult, WeightVersion
from control_plane.core.request import OutputKind, Request, SequenceId, StopScanner
from control_plane.core.sequence import Sequence
from control_plane.core.suspicion import Accusation, Judgement
from control_plane.core.tokens import Tokens
from control_plane.core.weights import InFlightPolicy


class Scheduler:
    """Decides, step by step, what one worker runs. Every method runs to completion at once."""

    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int,
        weight_version: WeightVersion,
        adapters: Mapping[int, str] | None = None,
    ) -> None:
        self._ledger = Ledger(config, epoch, weight_version, adapters)
        self.adapters = AdapterTurns(self._ledger)

    @property
    def ledger(self) -> Ledger:
        """The books, for checks and tests; to be read only."""
        return self._ledger

    @property
    def has_work(self) -> bool:
        """Whether a plan can be made: now, after the results in flight, or after `sample`."""
        ledger = self._ledger
        return bool(ledger.sequences or ledger.inflight or ledger.released_rows)

    @property
    def inflight_count(self) -> int:
        """Messages whose results are still to come."""
        return len(self._ledger.inflight)

    # --- what the clients want ----------------------------------------------------------------

    def add(
        self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None = None
    ) -> None:
        """Queues a sequence of a request. Raises RequestTooLong or QueueFull.

        What the request brings as resumed is output already, and none of it is an end. `scanner`
        has seen those tokens.

        `sequence_id` was never used before. `scanner` is asked about each step's tokens, already
        cut at the first stop token and the limit, before they are handed out. Where it finds a stop
        string complete, the sequence ends with STOP, even when the same token would have ended it
        otherwise.
        """
        ledger = self._ledger
        assert sequence_id not in ledger.sequences, f"sequence {sequence_id} exists"
        assert request.output is not OutputKind.NONE, "a request wants tokens"
        ledger.admission.check(request, len(ledger.sequences))
        ledger.enqueue(sequence_id, request, scanner)

    @property
    def room(self) -> int:
        """Sequences that would be taken now."""
        ledger = self._ledger
        return max(0, ledger.config.max_live_count - len(ledger.sequences))

    def retry_after(self, now: float) -> float:
        """Seconds until there should be room again."""
        return self._ledger.admission.retry_after(now)

    def sample(self, sequence_id: SequenceId, mask: bytes | None) -> None:
        """Says which tokens may come next in a sequence whose request says HOLD; None: any.

        To be called once for each of its tokens: after `add` for the first, after the output that
        brought the last token for the next one, as soon as the mask is known. The sequence computes
        ahead until then, but not beyond the token it waits for. Whether its worker was lost
        meanwhile is no concern of the caller's. Does nothing for a sequence that is over.
        """
        sequence = self._ledger.sequences.get(sequence_id)
        if sequence is not None:
            self._ledger.allow(sequence, mask or b"")

    def finish(self, sequence_id: SequenceId, reason: FinishReason) -> Finish | None:
        """Ends a sequence from outside, e.g. cancelled. Frees all it holds at once.

        None when the sequence is unknown or already over.
        """
        sequence = self._ledger.sequences.get(sequence_id)
        return None if sequence is None else self._ledger.end(sequence, reason)

    # --- other replicas -----------------------------------------------------------------------

    def withdraw(self, sequence_id: SequenceId) -> Sequence:
        """Gives a live sequence away, for another scheduler to adopt; frees all it held here.

        Its token log goes with it, and its strikes. Its tokens in flight don't.
        """
        return self._ledger.withdraw(self._ledger.sequences[sequence_id])

    def adopt(self, sequence: Sequence, *, arithmetic_changed: bool = False) -> None:
        """Queues a sequence that another scheduler has withdrawn, with the rank it had there.

        The caller knows that it can go on here, and that it is shorter than this worker's length.
        `arithmetic_changed` as for `resync`.
        """
        self._ledger.adopt(sequence)
        sequence.arithmetic_changed |= arithmetic_changed and sequence.completion_count > 0
        suspicion.meet(self._ledger, sequence)

    # --- the worker ---------------------------------------------------------------------------

    def next_message(self, now: float) -> Message | None:
        """What to send next, before the next call; None: nothing to do, or too much in flight.

        The sampling of held rows comes before the next step, and whatever is in flight. Behind it
        there may be adapters to load: see `adapters`.
        """
        if self._ledger.adapters.queues:
            self.adapters.take(now)
        return planner.plan_sample(self._ledger) or self.schedule(now)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, to be sent before the next call. None: nothing to do, or too many ahead.

        Whenever nothing is in flight and a sequence is live that is not held, there is a plan with
        rows to run: the first such sequence by rank can always go on. (Where rows take turns, see
        turns.py, it does so when those whose turn it is can't.) While all that live are held,
        there is nothing to plan until `sample` is called for one of them. With no sequence left, a
        last plan gives back the rows.
        """
        ledger = self._ledger
        if ledger.open_step_count >= ledger.config.max_inflight_step_count:
            return None
        return planner.plan_step(ledger, now)

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Takes the result of the oldest message in flight. Raises ResultMismatch for any other."""
        return update.apply_result(self._ledger, result)

    def accuse(
        self, accusation: Accusation, max_strikes: int, *, may_appeal: bool = False
    ) -> Judgement:
        """A claim ended while plans were in flight. Ends those that are surely to blame.

        To be called once for such an end, before `resync`. A sequence is to blame when the worker
        named it for certain, or when it has been in flight at `max_strikes` such ends without any
        progress, the last of them alone and, with `may_appeal`, not all of them at one replica as
        far as another can take it. It ends with FAULT. The caller ends the rest where the
        worker is found to be broken.
        """
        return suspicion.judge(self._ledger, accusation, max_strikes, may_appeal=may_appeal)

    def close(self, *, is_closing: bool = True) -> bool:
        """Lets nobody begin any more, until the weights are exchanged, or it is taken back.

        Whoever runs or has tokens goes on, with the weights that the worker has. Returns whether
        nobody does any more.
        """
        self._ledger.is_closing = is_closing
        return not switch.has_begun(self._ledger)

    def switch_weights(
        self, version: WeightVersion, policy: InFlightPolicy
    ) -> list[SequenceOutput]:
        """The worker has other weights from now on: every plan behind this names `version`.

        Nothing may be in flight. Whoever has no tokens starts over, and nobody will notice. With
        CONTINUE_ON_NEW those that have tokens keep them, wait with the ranks they have, and are
        added whole. With KEEP_KV they stay in their rows, with the KV they have; no other sequence
        gets a block of it. With ABORT they end, with WEIGHTS_CHANGED. With FINISH_ON_OLD there must
        be none: see `close`. What was cached is not found any more.
        """
        return switch.switch_weights(self._ledger, version, policy)

    def resync(
        self,
        config: SchedulerConfig,
        epoch: int,
        weight_version: WeightVersion,
        *,
        keep_kv: bool = False,
        arithmetic_changed: bool = False,
        adapters: Mapping[int, str] | None = None,
    ) -> list[SequenceOutput]:
        """The worker was lost or replaced: what is in flight is forgotten, everybody starts again.

        Running sequences go back to the queue with their token logs and ranks; rows start empty,
        step ids at 1. Those that have `obstacles` are over already. The result is empty unless
        the new worker holds shorter sequences than the old one did: a sequence that is as long
        already ends here. `arithmetic_changed`: the worker rounds otherwise than the last one, and
        the ends of those that have tokens will say so. `adapters`: the digests of those that the
        worker holds, by slot.

        With `keep_kv` the blocks keep their content, less what steps in flight may have written,
        and the prefix cache still finds it. The caller knows that this is the same life of the same
        worker with the same weights and geometry, and that nobody else has claimed it meanwhile.
        """
        ledger = self._ledger
        for sequence in ledger.sequences.values():
            sequence.credited(ledger.weight_version)
        if keep_kv:
            assert _kv_identity(config, weight_version) == _kv_identity(
                ledger.config, ledger.weight_version
            ), "KV of other weights or another geometry"
        if weight_version != ledger.weight_version:
            ledger.counters.credit(ledger.weight_version.label)
        ledger.lose_worker(keep_kv=keep_kv)
        ledger.attach(config, epoch, weight_version, keep_kv=keep_kv, adapters=adapters)
        sequences = list(ledger.waiting)
        for sequence in sequences:
            ledger.fit(sequence)
            sequence.arithmetic_changed |= arithmetic_changed and sequence.completion_count > 0
        ledger.waiting.reorder()
        for sequence in sequences:
            if sequence.request.adapter is not None:
                ledger.waiting.remove(sequence)
                ledger.adapters.enlist(sequence)
        return [
            SequenceOutput(
                sequence.sequence_id, Tokens([]), ledger.end(sequence, FinishReason.LENGTH)
            )
            for sequence in sequences
            if len(sequence.token_ids) >= sequence.token_limit
        ]

    # --- for people ---------------------------------------------------------------------------

    def stats(self) -> Stats:
        """A snapshot of loads and counters."""
        ledger = self._ledger
        pool, counters, block_size = ledger.pool, ledger.counters, ledger.config.block_size
        return Stats(
            running=len(ledger.running),
            waiting=len(ledger.waiting) + len(ledger.parked) + len(ledger.adapters),
            inflight=len(ledger.inflight),
            kv_active_tokens=pool.referenced_count * block_size,
            kv_cached_tokens=pool.idle_count * block_size,
            kv_free_tokens=(pool.free_count - pool.idle_count) * block_size,
            submitted=counters.submitted,
            moved_in=counters.moved_in,
            moved_out=counters.moved_out,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            generated_tokens=counters.generated_tokens,
            finished=dict(counters.finished),
            generated_by_weights=counters.generated_by(ledger.weight_version.label),
            adapters_waiting=len(ledger.adapters),
            adapter_hits=counters.adapter_hits,
            adapter_waits=counters.adapter_waits,
            adapter_loads=counters.adapter_loads,
            adapter_failures=counters.adapter_failures,
            adapter_evictions=counters.adapter_evictions,
        )

    def story(self, sequence_id: SequenceId) -> list[str]:
        """The sequence's last changes of state, oldest first; bounded over all sequences."""
        return self._ledger.story.of([sequence_id])


def _kv_identity(
    config: SchedulerConfig, weight_version: WeightVersion
) -> tuple[int, int, bool, str]:
    """What KV blocks of equal numbers must agree in to hold the same."""
    return (
        config.block_count,
        config.block_size,
        config.enable_prefix_caching,
        weight_version.digest,
    )

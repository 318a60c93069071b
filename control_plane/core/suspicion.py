"""Who is to blame when a worker refuses a plan, or ends while plans are in flight.

Where the worker names rows whose plan no state would allow, their sequences end and nobody else is
concerned. Where it can't say, each sequence of the plans in flight gets a strike. Progress takes
its strikes away. A sequence with two strikes is a suspect. Suspects run one at a time, with nobody
beside them, until they have made progress (see planner.py). So a sequence that collects all its
strikes had the last of them when it was alone: it ends, and the innocent go on. When one after
another is convicted and nobody gets a token in between, it is the worker that is broken.

Where there are other replicas, nobody is convicted by one worker alone: who has had all trials but
the last at one replica appeals, and has the last at another. When two appeal in a row, all suspects
there do: others find out whether it is the worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.ledger import InflightMessage, Ledger
from control_plane.core.plan import Row
from control_plane.core.request import SequenceId
from control_plane.core.sequence import Sequence, SequenceState
from control_plane.core.tokens import Tokens

_APPEALS = 2
"""In a row, after which it looks as if the worker were to blame."""
SUSPECT_STRIKES = 2
"""With fewer, a sequence was in the wrong company, or the network broke."""
_FRUITLESS_ENDS = 2
"""In a row, after which others are the better place for a new request."""


@dataclass(frozen=True, slots=True)
class Accusation:
    """What is known of why a claim ended while plans were in flight.

    `step_id`: the message that ended it, 0 if unknown. `rows`: those of it that are to blame, as
    far as the worker can say. `is_certain`: these rows would be refused in any state.
    """

    step_id: int = 0
    rows: tuple[Row, ...] = ()
    is_certain: bool = False
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of an accusation: the ends of those convicted, with FAULT.

    `worker_is_broken`: it fails whoever runs, so that nobody's request is to blame.
    """

    convicted: list[SequenceOutput]
    worker_is_broken: bool = False
    has_appeals: bool = False
    """Some should have their next trial at another replica."""


def judge(
    ledger: Ledger, accusation: Accusation, max_strikes: int, *, may_appeal: bool = False
) -> Judgement:
    """Strikes the accused, and ends those that are convicted.

    To be called once for a claim that has ended, before the resync. The worker is broken after
    `max_strikes` convictions in a row. `may_appeal`: there are other replicas.
    """
    every = list(ledger.inflight)
    members = list(_members([m for m in every if m.step_id == accusation.step_id] or every))
    named = [member for member in members if member.row in accusation.rows]
    is_certain = accusation.is_certain and bool(named)
    accused = _live(named or members)
    if is_certain:
        return Judgement([_convict(ledger, own, accusation.detail) for own, _ in accused])
    if members:
        _count_end(ledger)
    outputs = []
    for sequence, reached in accused:
        if reached > sequence.strike_mark:
            _clear(sequence)
            sequence.strike_mark = reached
        sequence.strikes += 1
        if sequence.strikes >= max_strikes:
            detail = f"{sequence.strikes} claims of the worker ended over it: {accusation.detail}"
            outputs.append(_convict(ledger, sequence, detail))
        elif sequence.strikes >= SUSPECT_STRIKES:
            ledger.suspects[sequence.sequence_id] = sequence
            ledger.tell(sequence, f"suspect after {sequence.strikes} strikes")
            is_last = sequence.strikes == max_strikes - 1
            if may_appeal and is_last and not sequence.struck_elsewhere:
                _appeal(ledger, sequence)
    if outputs and ledger.counters.generated_tokens > ledger.tokens_at_conviction:
        ledger.convictions_in_row = 0
    ledger.convictions_in_row += len(outputs)
    if outputs:
        ledger.tokens_at_conviction = ledger.counters.generated_tokens
    worker_is_broken = ledger.convictions_in_row >= max_strikes
    if worker_is_broken:
        ledger.convictions_in_row = 0
    if may_appeal and (worker_is_broken or ledger.appeals_in_row >= _APPEALS):
        for sequence in ledger.suspects.values():
            sequence.appeals = True
    has_appeals = any(sequence.appeals for sequence in ledger.suspects.values())
    return Judgement(outputs, worker_is_broken, has_appeals)


def is_doubtful(ledger: Ledger) -> bool:
    """Whether the last claims ended over what ran, and nobody has got a token since the first.

    Whoever is to blame, an empty replica of this kind only looks idle.
    """
    return (
        ledger.fruitless_ends >= _FRUITLESS_ENDS
        and ledger.counters.generated_tokens == ledger.tokens_at_end
    )


def _count_end(ledger: Ledger) -> None:
    """A claim has ended while somebody ran."""
    if ledger.counters.generated_tokens != ledger.tokens_at_end:
        ledger.fruitless_ends = 0
    ledger.fruitless_ends += 1
    ledger.tokens_at_end = ledger.counters.generated_tokens


def meet(ledger: Ledger, sequence: Sequence) -> None:
    """A sequence comes from another worker, and its strikes with it."""
    sequence.struck_elsewhere, sequence.appeals = sequence.strikes > 0, False
    if sequence.strikes >= SUSPECT_STRIKES:
        ledger.suspects[sequence.sequence_id] = sequence


def next_suspect(ledger: Ledger) -> Sequence | None:
    """Whose turn it is to run alone; acquits those before it that have made progress.

    Nothing may be in flight.
    """
    assert not ledger.inflight
    while ledger.suspects:
        sequence = next(iter(ledger.suspects.values()))
        if sequence.reached <= sequence.strike_mark and not sequence.held:
            return sequence
        del ledger.suspects[sequence.sequence_id]
        _clear(sequence)
        ledger.tell(sequence, "acquitted")
    return None


def _clear(sequence: Sequence) -> None:
    """It has made progress: its strikes were not its own doing."""
    sequence.strikes = 0
    sequence.struck_elsewhere = sequence.appeals = False


def _appeal(ledger: Ledger, sequence: Sequence) -> None:
    if ledger.counters.generated_tokens > ledger.tokens_at_appeal:
        ledger.appeals_in_row = 0
    ledger.appeals_in_row += 1
    ledger.tokens_at_appeal = ledger.counters.generated_tokens
    sequence.appeals = True


def _convict(ledger: Ledger, sequence: Sequence, detail: str) -> SequenceOutput:
    finish = ledger.end(sequence, FinishReason.FAULT, detail=detail)
    return SequenceOutput(sequence.sequence_id, Tokens([]), finish)


@dataclass(frozen=True, slots=True)
class _Member:
    """A sequence in a message in flight, its row then, and how far it was known to have come."""

    row: Row
    sequence: Sequence
    reached: int


def _members(messages: list[InflightMessage]) -> Iterator[_Member]:
    for message in messages:
        for row, sequence, start in message.chunks:
            yield _Member(row, sequence, start)
        for row, sequence in message.members():
            yield _Member(row, sequence, len(sequence.token_ids))


def _live(members: list[_Member]) -> list[tuple[Sequence, int]]:
    """Each that is not over once, and the least that it is known to have reached."""
    reached: dict[SequenceId, tuple[Sequence, int]] = {}
    for member in members:
        sequence = member.sequence
        if sequence.state is not SequenceState.OVER:
            _, least = reached.get(sequence.sequence_id, (sequence, member.reached))
            reached[sequence.sequence_id] = (sequence, min(least, member.reached))
    return list(reached.values())

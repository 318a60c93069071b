"""What a result does to the sequences that wait for it."""

from __future__ import annotations

from control_plane.core.ends import first_end
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.ledger import InflightMessage, Ledger
from control_plane.core.plan import RowFault, StepResult
from control_plane.core.sequence import Sequence, SequenceState
from control_plane.core.tokens import Tokens

_LARGEST_TOKEN = 2**32 - 1


def apply_result(ledger: Ledger, result: StepResult) -> list[SequenceOutput]:
    """Gives each sequence its tokens, and ends those that are complete or faulted.

    Raises ResultMismatch, with nothing changed, unless the result answers the oldest message in
    flight with tokens or a fault for each of its sampled rows, and names the rows it holds. Tokens
    of sequences that ended meanwhile are dropped; those of preempted ones are kept. Tokens after an
    end are dropped and not counted.
    """
    step = _verify(ledger, result)
    ledger.inflight.popleft()
    if step.is_step:
        ledger.answered_step_id = step.step_id
    if step.draft_counts or result.faults:
        outputs = _take_all(ledger, step, result)
    else:
        outputs = _take_one_each(ledger, step, result)
    if result.faults:
        outputs += _end_faulted(ledger, step, result.faults)
    return outputs


def _take_one_each(
    ledger: Ledger, step: InflightMessage, result: StepResult
) -> list[SequenceOutput]:
    """The outputs of a step in which every row got one token: flat, as it runs for every row."""
    outputs: list[SequenceOutput] = []
    add_output = outputs.append
    over = SequenceState.OVER
    for sequence, chunk in zip(step.sequences, result.tokens.singles(), strict=True):
        if sequence.state is over:
            continue
        token = chunk.ids[0]
        if (
            sequence.watched
            or token in sequence.stop_ids
            or len(sequence.token_ids) + 1 >= sequence.token_limit
        ):
            add_output(_take(ledger, sequence, chunk, 0))
        else:  # as _take does it, where one token can't be the end
            sequence.pending -= 1
            sequence.token_ids.append(token)
            add_output(SequenceOutput(sequence.sequence_id, chunk))
    ledger.counters.generated_tokens += len(outputs)
    return outputs


def _take_all(ledger: Ledger, step: InflightMessage, result: StepResult) -> list[SequenceOutput]:
    """The outputs of a step whose rows got different numbers of tokens, or faulted."""
    faulted = {fault.row for fault in result.faults}
    draft_counts = step.draft_counts or [0] * len(step.rows)
    expected = [
        (sequence, draft_count)
        for row, sequence, draft_count in zip(step.rows, step.sequences, draft_counts, strict=True)
        if row not in faulted
    ]
    chunks = result.tokens.split(result.token_counts or [1] * len(expected))
    outputs = [
        _take(ledger, sequence, chunk, draft_count)
        for (sequence, draft_count), chunk in zip(expected, chunks, strict=True)
        if sequence.state is not SequenceState.OVER
    ]
    ledger.counters.generated_tokens += sum(len(output.tokens) for output in outputs)
    return outputs


def _end_faulted(
    ledger: Ledger, step: InflightMessage, faults: list[RowFault]
) -> list[SequenceOutput]:
    """Ends the sequences of faulted rows, in the step's order."""
    by_row = {fault.row: fault for fault in faults}
    outputs = []
    for row, sequence in zip(step.rows, step.sequences, strict=True):
        if row in by_row and sequence.state is not SequenceState.OVER:
            detail = f"{by_row[row].kind}: {by_row[row].detail}"
            finish = ledger.end(sequence, FinishReason.FAULT, detail=detail)
            outputs.append(SequenceOutput(sequence.sequence_id, Tokens([]), finish))
    return outputs


def _take(ledger: Ledger, sequence: Sequence, chunk: Tokens, draft_count: int) -> SequenceOutput:
    """A step's tokens up to their first end."""
    ids, room = chunk.ids, sequence.token_limit - len(sequence.token_ids)
    assert len(ids) <= room, "drafts were planned beyond the limit"
    end = first_end(ids, room, sequence.request.stop, sequence.scanner)
    if end is None:
        sequence.confirmed(ids, draft_count)
        return SequenceOutput(sequence.sequence_id, chunk)
    sequence.confirmed(ids[: end.count], draft_count)
    finish = ledger.end(sequence, end.reason, end.stop_token_id)
    return SequenceOutput(sequence.sequence_id, chunk.head(end.count), finish)


def _verify(ledger: Ledger, result: StepResult) -> InflightMessage:
    if not ledger.inflight:
        raise ResultMismatch(f"step {result.step_id} has a result, but no plan is in flight", [])
    step = ledger.inflight[0]
    problem = _problem(ledger.epoch, step, result)
    if problem is not None:
        ids = {sequence.sequence_id for sequence in step.sequences}
        raise ResultMismatch(problem, ledger.story.of(ids))
    return step


def _problem(epoch: int, step: InflightMessage, result: StepResult) -> str | None:
    """What is wrong with a result as the answer to a step."""
    if (result.epoch, result.step_id) != (epoch, step.step_id):
        return (
            f"a result of step {result.step_id} in epoch {result.epoch}, expected step "
            f"{step.step_id} in epoch {epoch}"
        )
    rows, draft_counts = step.rows, step.draft_counts
    if result.faults:
        faulted = {fault.row for fault in result.faults}
        if len(faulted) != len(result.faults):
            return f"step {step.step_id} has two faults for one row"
        if not faulted.issubset(rows):
            return f"step {step.step_id} has a fault for a row that was not sampled"
        draft_counts = [
            count for row, count in zip(rows, draft_counts, strict=False) if row not in faulted
        ]
        rows = [row for row in rows if row not in faulted]
    if result.rows != rows:
        return f"step {step.step_id} has tokens for other rows than were sampled"
    if result.held_rows != step.held_rows:
        return f"step {step.step_id} holds other rows than those that were to be held"
    return _problem_with_tokens(step.step_id, len(rows), draft_counts, result)


def _problem_with_tokens(
    step_id: int, row_count: int, draft_counts: list[int], result: StepResult
) -> str | None:
    """Each row must have a token, and may have one more for each draft that it verified."""
    ids = result.tokens.ids
    counts = result.token_counts or [1] * row_count
    if len(counts) != row_count or sum(counts) != len(ids):
        return f"step {step_id} has {len(ids)} tokens for {row_count} rows"
    if counts.count(1) != row_count and not all(
        1 <= count <= 1 + draft_count
        for count, draft_count in zip(counts, draft_counts or [0] * row_count, strict=True)
    ):
        return f"step {step_id} has a row without a token, or with more than it could verify"
    if not result.tokens.is_parallel:
        return f"step {step_id} has columns of different lengths"
    if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_TOKEN:
        return f"step {step_id} has a token that no vocabulary has"
    return None

"""What a step's result does to the sequences that asked for it."""

from __future__ import annotations

from control_plane.core.errors import ResultMismatch
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.ledger import InflightStep, Ledger
from control_plane.core.plan import RowFault, StepResult
from control_plane.core.sequence import Sequence, SequenceState
from control_plane.core.tokens import Tokens

_LARGEST_TOKEN = 2**32 - 1


def apply_result(ledger: Ledger, result: StepResult) -> list[SequenceOutput]:
    """Gives each sequence its tokens, and ends those that are complete or faulted.

    Raises ResultMismatch, with nothing changed, unless the result answers the oldest plan in flight
    with tokens or a fault for each of its sampled rows. Tokens of sequences that ended meanwhile
    are dropped; those of preempted ones are kept. Tokens after an end are dropped and not counted.
    """
    step = _verify(ledger, result)
    ledger.inflight.popleft()
    sequences = step.sequences
    faults: list[tuple[Sequence, RowFault]] = []
    if result.faults:
        by_row = {fault.row: fault for fault in result.faults}
        pairs = list(zip(step.rows, sequences, strict=True))
        faults = [(sequence, by_row[row]) for row, sequence in pairs if row in by_row]
        sequences = [sequence for row, sequence in pairs if row not in by_row]
    outputs: list[SequenceOutput] = []
    add_output = outputs.append
    over = SequenceState.OVER
    chunks = result.tokens.split(result.token_counts or [1] * len(sequences))
    for sequence, chunk in zip(sequences, chunks, strict=True):
        if sequence.state is over:
            continue
        token = chunk.ids[0]
        if (
            sequence.scanner is not None
            or token in sequence.stop_ids
            or len(sequence.token_ids) + 1 >= sequence.token_limit
        ):
            add_output(_take(ledger, sequence, chunk))
        else:  # as _take does it, where one token can't be the end
            sequence.pending -= 1
            sequence.token_ids.append(token)
            add_output(SequenceOutput(sequence.sequence_id, chunk))
    ledger.counters.generated_tokens += len(outputs)
    for sequence, fault in faults:
        if sequence.state is not over:
            finish = ledger.end(
                sequence, FinishReason.FAULT, detail=f"{fault.kind}: {fault.detail}"
            )
            outputs.append(SequenceOutput(sequence.sequence_id, Tokens([]), finish))
    return outputs


def _take(ledger: Ledger, sequence: Sequence, chunk: Tokens) -> SequenceOutput:
    """A step's tokens up to their first end: stop string, stop token, or the limit.

    Where several come with the same token, the earliest named here is the reason.
    """
    room = sequence.token_limit - len(sequence.token_ids)
    ids = chunk.ids[:room]
    reason = FinishReason.LENGTH if len(ids) == room else None
    stop_token_id: int | None = None
    for index, token in enumerate(ids):
        if token in sequence.stop_ids:
            reason = FinishReason.STOP
            stop_token_id = token if token in sequence.request.stop.stop_token_ids else None
            ids = ids[: index + 1]
            break
    if sequence.scanner is not None:
        count = sequence.scanner.push(ids)
        if count is not None:
            reason, stop_token_id = FinishReason.STOP, None
            ids = ids[:count]
    sequence.confirmed(ids)
    finish = None if reason is None else ledger.end(sequence, reason, stop_token_id)
    return SequenceOutput(sequence.sequence_id, chunk.head(len(ids)), finish)


def _verify(ledger: Ledger, result: StepResult) -> InflightStep:
    if not ledger.inflight:
        raise ResultMismatch(f"step {result.step_id} has a result, but no plan is in flight", [])
    step = ledger.inflight[0]
    problem = _problem(ledger.epoch, step, result)
    if problem is not None:
        ids = {sequence.sequence_id for sequence in step.sequences}
        raise ResultMismatch(problem, ledger.story.of(ids))
    return step


def _problem(epoch: int, step: InflightStep, result: StepResult) -> str | None:
    """What is wrong with a result as the answer to a step."""
    if (result.epoch, result.step_id) != (epoch, step.step_id):
        return (
            f"a result of step {result.step_id} in epoch {result.epoch}, expected step "
            f"{step.step_id} in epoch {epoch}"
        )
    if result.held_rows:
        return f"step {step.step_id} holds rows that were to be sampled"
    expected = step.rows
    if result.faults:
        faulted = {fault.row for fault in result.faults}
        if len(faulted) != len(result.faults):
            return f"step {step.step_id} has two faults for one row"
        if not faulted.issubset(step.rows):
            return f"step {step.step_id} has a fault for a row that was not sampled"
        expected = [row for row in step.rows if row not in faulted]
    if result.rows != expected:
        return f"step {step.step_id} has tokens for other rows than were sampled"
    return _problem_with_tokens(step.step_id, len(expected), result)


def _problem_with_tokens(step_id: int, row_count: int, result: StepResult) -> str | None:
    ids = result.tokens.ids
    if result.token_counts and result.token_counts != [1] * row_count:
        return f"step {step_id} has a row with other than one token"
    if len(ids) != row_count:
        return f"step {step_id} has {len(ids)} tokens for {row_count} rows"
    if not result.tokens.is_parallel:
        return f"step {step_id} has columns of different lengths"
    if ids and not 0 <= min(ids) <= max(ids) <= _LARGEST_TOKEN:
        return f"step {step_id} has a token that no vocabulary has"
    return None

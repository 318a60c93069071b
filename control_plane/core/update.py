"""What a step's result does to the sequences that asked for it."""

from __future__ import annotations

from control_plane.core.errors import ResultMismatch
from control_plane.core.events import Finish, FinishReason, RequestOutput
from control_plane.core.ledger import InflightStep, Ledger
from control_plane.core.plan import Row, RowFault, StepResult
from control_plane.core.sequence import Sequence, SequenceState

_LARGEST_TOKEN = 2**32 - 1


def apply_result(ledger: Ledger, result: StepResult) -> list[RequestOutput]:
    """Gives each sequence its token, and ends those that are complete or faulted.

    Raises ResultMismatch, with nothing changed, unless the result answers the oldest plan in flight
    with a token or a fault for each of its sampled rows. Tokens of sequences that ended meanwhile
    are dropped; those of preempted ones are kept.
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
    outputs: list[RequestOutput] = []
    add_output = outputs.append
    over = SequenceState.OVER
    for sequence, token in zip(sequences, result.tokens, strict=True):
        if sequence.state is over:
            continue
        sequence.pending -= 1
        token_ids = sequence.token_ids
        token_ids.append(token)
        finish: Finish | None = None
        if token in sequence.stop_ids:
            own = token in sequence.request.stop.stop_token_ids
            finish = ledger.end(sequence, FinishReason.STOP, token if own else None)
        elif len(token_ids) >= sequence.token_limit:
            finish = ledger.end(sequence, FinishReason.LENGTH)
        add_output(RequestOutput(sequence.request.request_id, [token], finish))
    ledger.counters.generated_tokens += len(outputs)
    for sequence, fault in faults:
        if sequence.state is not over:
            finish = ledger.end(
                sequence, FinishReason.FAULT, detail=f"{fault.kind}: {fault.detail}"
            )
            outputs.append(RequestOutput(sequence.request.request_id, [], finish))
    return outputs


def _verify(ledger: Ledger, result: StepResult) -> InflightStep:
    if not ledger.inflight:
        raise ResultMismatch(f"step {result.step_id} has a result, but no plan is in flight")
    step = ledger.inflight[0]
    if (result.epoch, result.step_id) != (ledger.epoch, step.step_id):
        raise ResultMismatch(
            f"a result of step {result.step_id} in epoch {result.epoch}, expected step "
            f"{step.step_id} in epoch {ledger.epoch}"
        )
    if result.held_rows:
        raise ResultMismatch(f"step {step.step_id} holds rows that were to be sampled")
    expected = step.rows
    if result.faults:
        expected = _without_faulted(step, result.faults)
    if result.rows != expected:
        raise ResultMismatch(f"step {step.step_id} has tokens for other rows than were sampled")
    count = len(expected)
    if result.token_counts and result.token_counts != [1] * count:
        raise ResultMismatch(f"step {step.step_id} has a row with other than one token")
    if len(result.tokens) != count:
        raise ResultMismatch(
            f"step {step.step_id} has {len(result.tokens)} tokens for {count} rows"
        )
    if count and not 0 <= min(result.tokens) <= max(result.tokens) <= _LARGEST_TOKEN:
        raise ResultMismatch(f"step {step.step_id} has a token that no vocabulary has")
    return step


def _without_faulted(step: InflightStep, faults: list[RowFault]) -> list[Row]:
    faulted = {fault.row for fault in faults}
    if len(faulted) != len(faults):
        raise ResultMismatch(f"step {step.step_id} has two faults for one row")
    if not faulted.issubset(step.rows):
        raise ResultMismatch(f"step {step.step_id} has a fault for a row that was not sampled")
    return [row for row in step.rows if row not in faulted]

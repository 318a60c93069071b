"""What becomes of a scheduler's sequences when the weights of its worker are exchanged."""

from __future__ import annotations

from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.ledger import Ledger
from control_plane.core.plan import WeightVersion
from control_plane.core.sequence import NO_ROW
from control_plane.core.tokens import Tokens
from control_plane.core.weights import InFlightPolicy

_CHANGED = "the weights were exchanged, and what ran with the old ones was to end"


def switch_weights(
    ledger: Ledger, version: WeightVersion, policy: InFlightPolicy
) -> list[SequenceOutput]:
    """See Scheduler.switch_weights."""
    assert not ledger.inflight, "a step in flight would mix versions"
    outputs: list[SequenceOutput] = []
    match policy:
        case InFlightPolicy.FINISH_ON_OLD:
            assert not has_begun(ledger), "somebody has not finished with the old weights"
        case InFlightPolicy.ABORT:
            for sequence in list(ledger.sequences.values()):
                if sequence.completion_count:
                    finish = ledger.end(sequence, FinishReason.WEIGHTS_CHANGED, detail=_CHANGED)
                    outputs.append(SequenceOutput(sequence.sequence_id, Tokens([]), finish))
        case InFlightPolicy.CONTINUE_ON_NEW | InFlightPolicy.KEEP_KV:
            pass
    _change(ledger, version, keep_kv=policy is InFlightPolicy.KEEP_KV)
    ledger.is_closing = False
    return outputs


def _change(ledger: Ledger, version: WeightVersion, *, keep_kv: bool) -> None:
    """No block is found in the cache any more, and whoever runs waits again.

    With `keep_kv`, only those that have no KV, or whose logits the worker holds: these are of the
    old weights.
    """
    every = ledger.sequences.values()
    for sequence in every:
        sequence.credited(ledger.weight_version)
    ledger.pool.drop_since(0)
    ledger.cache.chain_from(version.digest)
    ledger.counters.credit(ledger.weight_version.label)
    ledger.weight_version = version
    for sequence in every:
        salt = sequence.request.cache_salt
        sequence.cache_root = ledger.cache.root(salt, sequence.adapter_digest)
        sequence.block_hashes.clear()
    for sequence in list(ledger.running):
        if keep_kv and sequence.computed and not sequence.held:
            sequence.keeps_kv = True
            ledger.kept[sequence.sequence_id] = sequence
            ledger.tell(sequence, "keeps its KV under other weights")
        else:
            ledger.start_over(sequence, "starts over under other weights")
    for sequence in [*ledger.waiting, *ledger.adapters.awaiting()]:
        ledger.adapters.unlist(sequence)
        sequence.missing = len(sequence.token_ids)
        ledger.adapters.enlist(sequence)
    for sequence in list(ledger.kept.values()):
        if sequence.row == NO_ROW:
            ledger.drop_kept_kv(sequence)


def has_begun(ledger: Ledger) -> bool:
    """Whether a sequence runs, or has tokens of these weights' making."""
    return bool(ledger.running) or any(
        sequence.completion_count for sequence in ledger.sequences.values()
    )

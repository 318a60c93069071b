"""Whose turn it is, where the stages of a pipeline work on as many steps at once. Pure.

A row's next step needs the token that its last one samples, behind all stages. So rows that decode
are spread over the steps in flight: each of these has its part of them, and a row comes again when
every other part had its turn. Its token is then just known, or on its way within the worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from operator import attrgetter

from control_plane.core.ledger import Ledger
from control_plane.core.sequence import Sequence

MOST_PENDING = 2
_last_step = attrgetter("last_step")


def resting(ledger: Ledger, step_id: int) -> Collection[Sequence]:
    """Who decodes and is not in step `step_id`, the next one.

    Those whose last step is the longest ago have their turn, no more of them than an equal part.
    Nobody is in more than MOST_PENDING steps at once: those behind the one at which a row ends are
    for nothing, and hold up who comes next.
    """
    stage_count = ledger.config.pipeline_stage_count
    if stage_count == 1:
        return ()
    decoding = [
        sequence
        for sequence in ledger.running
        if sequence.caught_up
        and not sequence.held
        and sequence.computed + sequence.ahead < sequence.token_limit - 1
    ]
    ready = [sequence for sequence in decoding if sequence.pending < MOST_PENDING]
    if not ready:
        return decoding
    ready.sort(key=_last_step)  # among equals, the order stays
    part_count = min(stage_count, len(decoding))
    size = -(-len(decoding) // part_count)
    due = max(ready[0].last_step, step_id - part_count)
    turn = {sequence for sequence in ready[:size] if sequence.last_step <= due}
    return {sequence for sequence in decoding if sequence not in turn}


def without(
    others: Collection[Sequence], running: Iterable[Sequence]
) -> Iterable[tuple[int, Sequence]]:
    """Those that run and are none of `others`, each with its place among all that run.

    `running` may lose what lies behind, while it is walked.
    """
    if not others:
        return enumerate(running)
    return (one for one in enumerate(running) if one[1] not in others)

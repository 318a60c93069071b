"""What a rank says of a step that it applied, so that ranks which have drifted apart are found.

No torch: the simulated runner says it, too.
"""

from __future__ import annotations

import hashlib

import numpy as np

from worker_service.domain.columns import IntColumn

_BYTES = 16


def digest_of(
    epoch: int,
    step_id: int,
    rows: IntColumn,
    token_counts: IntColumn,
    positions: IntColumn,
    tokens: IntColumn,
) -> bytes:
    """16 bytes over the scheduled rows int32 [R] with their token counts int32 [R], the positions
    int32 [T] of those tokens, and the sampled tokens as every rank has them int32 [S], below 0
    where a row failed. For a Sample it is the sampled rows, with the position of each new token."""
    sizes = (epoch, step_id, rows.size, positions.size, tokens.size)
    digest = hashlib.blake2b(np.array(sizes, dtype="<i8").tobytes(), digest_size=_BYTES)
    for column in (rows, token_counts, positions, tokens):
        digest.update(column.astype("<i4").tobytes())
    return digest.digest()

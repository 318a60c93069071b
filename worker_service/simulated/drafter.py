"""The simulated worker's drafter: some of its drafts are right, some are wrong, always the same."""

from __future__ import annotations

import numpy as np

from worker_service.domain.columns import IntColumn
from worker_service.simulated.arithmetic import (
    Words,
    choose,
    mix,
    position_weights,
    preferences,
    scramble,
)

# One draft in this many is wrong.
_WRONG_ONE_IN = 3


def propose(
    token_ids: IntColumn,
    count: int,
    seed: int,
    vocabulary_size: int,
    first_token: int = 0,
    salt: int = 0,
) -> list[int]:
    """`count` drafts behind the tokens int32 [n] of a sequence, whose seed is 0 when it is greedy;
    `salt` is the weights'.

    It reads the tokens, not the KV: when the KV is wrong, all drafts are wrong.
    """
    positions = np.arange(token_ids.size, dtype=np.uint64)
    left = mix(token_ids, positions.astype(np.int32), salt)
    total = (left * position_weights(positions)).sum(dtype=np.uint64, keepdims=True)
    drafts: list[int] = []
    for position in range(token_ids.size, token_ids.size + count):
        place = np.array([position], dtype=np.uint64)
        preference = preferences(total, np.array([seed], dtype=np.uint64), place)
        draft = choose(preference, vocabulary_size, first_token)
        if _is_wrong(preference):
            draft = (draft + 1) % np.int32(vocabulary_size)
        drafts.append(int(draft[0]))
        total = total + mix(draft, place.astype(np.int32), salt) * position_weights(place)
    return drafts


def _is_wrong(preference: Words) -> bool:
    return int(scramble(preference)[0]) % _WRONG_ONE_IN == 0

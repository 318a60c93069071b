"""Counter-based random numbers: each draw is a function of (seed, position, purpose), no state.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; constants and
known answers as in the authors' Random123). Host code: a few numbers per sampled row.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_INCREMENTS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_WORD = np.uint64(32)


class Purpose(IntEnum):
    """What a draw is for. Draws for different purposes at one position never share numbers."""

    TOKEN = 0


def philox(counters: UInt32s, keys: UInt32s) -> UInt32s:
    """Philox4x32-10 of counters [n, 4] under keys [n, 2] → [n, 4]."""
    c0, c1, c2, c3 = counters.T.copy()
    k0, k1 = keys.T.copy()
    for _ in range(_ROUNDS):
        product0 = c0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _WORD).astype(np.uint32) ^ c1 ^ k0,
            product1.astype(np.uint32),
            (product0 >> _WORD).astype(np.uint32) ^ c3 ^ k1,
            product0.astype(np.uint32),
        )
        k0 = k0 + _KEY_INCREMENTS[0]
        k1 = k1 + _KEY_INCREMENTS[1]
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(
    seeds: UInt64s, positions: npt.NDArray[np.int32], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row, a multiple of 2⁻⁵³.

    The key is the seed's two words, low first; the counter is (position, purpose, 0, 0); the first
    two words of the output, low first, give the 53 bits.
    """
    keys = np.stack((seeds.astype(np.uint32), (seeds >> _WORD).astype(np.uint32)), axis=1)
    counters = np.zeros((seeds.size, 4), dtype=np.uint32)
    counters[:, 0] = positions
    counters[:, 1] = purpose
    words = philox(counters, keys).astype(np.uint64)
    bits = (words[:, 1] << _WORD | words[:, 0]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53

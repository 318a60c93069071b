"""The counter-based generator against its authors' known answers."""

from __future__ import annotations

import numpy as np
import pytest

from worker_service.sampling.rng import Purpose, philox, uniforms

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    out = philox(np.array([counter], dtype=np.uint32), np.array([key], dtype=np.uint32))
    assert out.tolist() == [list(expected)]


def test_rows_are_independent() -> None:
    counters = np.array([known[0] for known in KNOWN], dtype=np.uint32)
    keys = np.array([known[1] for known in KNOWN], dtype=np.uint32)
    assert philox(counters, keys).tolist() == [list(known[2]) for known in KNOWN]


def test_uniform_is_the_documented_function_of_the_first_known_answer() -> None:
    drawn = uniforms(np.array([0], dtype=np.uint64), np.array([0], dtype=np.int32), Purpose.TOKEN)
    assert drawn[0] == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) / 2**53


def test_every_bit_of_seed_and_position_matters() -> None:
    seeds = np.array([0, *(1 << bit for bit in range(64))], dtype=np.uint64)
    by_seed = uniforms(seeds, np.zeros(65, dtype=np.int32), Purpose.TOKEN)
    positions = np.array([0, *(1 << bit for bit in range(31))], dtype=np.int32)
    by_position = uniforms(np.zeros(32, dtype=np.uint64), positions, Purpose.TOKEN)
    assert len({*by_seed.tolist(), *by_position.tolist()}) == 65 + 32 - 1


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    count = 20000
    drawn = uniforms(
        np.full(count, 99, dtype=np.uint64), np.arange(count, dtype=np.int32), Purpose.TOKEN
    )
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    bins = np.histogram(drawn, bins=50, range=(0.0, 1.0))[0]
    chi_square = ((bins - count / 50) ** 2 / (count / 50)).sum()
    assert chi_square < 85.4  # the 0.1% point for 49 degrees of freedom

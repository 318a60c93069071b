"""Which part of a large matrix `make check` runs. `make test` runs all of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

QUICK = "quick"
"""The name of the Hypothesis profile of `make check`."""
UNSHRUNK = "unshrunk"
"""That of `make mutation`, which only asks whether a test fails: it has as many examples as QUICK,
and the one that fails is not made small."""


def spread(values: Iterable[object], count: int) -> list[Any]:
    """All values; but for `count` of them, evenly spread, marked slow.

    A tuple has a value for each of several parameters.
    """
    every = [value if isinstance(value, tuple) else (value,) for value in values]
    quick = {index * len(every) // count for index in range(count)}
    return [
        pytest.param(*value, marks=() if index in quick else pytest.mark.slow)
        for index, value in enumerate(every)
    ]


def examples(count: int) -> int:
    """How many examples Hypothesis makes: `count`, or a quarter of it in `make check`."""
    is_quick = settings.get_current_profile_name() in (QUICK, UNSHRUNK)
    return count // 4 if is_quick else count

"""The range of each number among the settings, beside its default in the settings' classes."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SHOWN_DIGITS = 40


@dataclass(frozen=True, slots=True)
class NumberRange:
    """From `minimum` to `maximum`, both included unless `excludes_minimum`."""

    minimum: float
    maximum: float
    excludes_minimum: bool = False


COUNT = NumberRange(1, 2**31 - 1)
"""Of what is counted in 32 bits: rows, tokens, blocks."""
BYTES = NumberRange(1, 2**63 - 1)
PORT = NumberRange(0, 65535)
SEED = NumberRange(0, 2**64 - 1)
SECONDS = NumberRange(0, 10**9)
"""The maximum is 31 years. Beyond some centuries the system's clocks can't wait."""
PATIENCE = NumberRange(0, 10**9, excludes_minimum=True)
THREADS = NumberRange(1, 1024)


def range_of(setting: Field[Any]) -> NumberRange | None:
    """The range that `option` was given."""
    allowed: NumberRange | None = setting.metadata.get("range")
    return allowed


def require_ranges(settings: DataclassInstance) -> None:
    """Raises ValueError, naming the first setting whose number is outside its range."""
    for setting in fields(settings):
        allowed, value = range_of(setting), getattr(settings, setting.name)
        if allowed is None or value is None:
            continue
        if not value >= allowed.minimum:  # nor is NaN
            raise ValueError(f"{setting.name} must be at least {allowed.minimum}, not {value}")
        if allowed.excludes_minimum and value == allowed.minimum:
            raise ValueError(f"{setting.name} must be above {allowed.minimum}, not {value}")
        if value > allowed.maximum:
            shown = _shown(value)
            raise ValueError(f"{setting.name} must be at most {allowed.maximum}, not {shown}")


def _shown(value: float) -> str:
    """Python refuses to write integers of some thousand digits."""
    if isinstance(value, int) and value >= 10**_SHOWN_DIGITS:
        return f"a number of {int(math.log10(value)) + 1} digits"
    return str(value)

"""Ranges of a value's fields, declared beside them: `temperature: Annotated[float, Range(0, 100)]`.

Twin of control_plane.core.ranges on purpose: neither plane imports the other, and the
control core imports nothing but itself (docs/adr/0014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_type_hints


@dataclass(frozen=True, slots=True)
class Range:
    """From `minimum` to `maximum`, both included unless `excludes_minimum`."""

    minimum: float
    maximum: float
    excludes_minimum: bool = False

    def __contains__(self, value: float) -> bool:
        # Every comparison with NaN is false.
        above = value > self.minimum if self.excludes_minimum else value >= self.minimum
        return above and value <= self.maximum

    def __str__(self) -> str:
        return f"{'(' if self.excludes_minimum else '['}{self.minimum:g}, {self.maximum:g}]"


def ranges_of(kind: type) -> dict[str, Range]:
    """The ranges of a dataclass's fields, by name. A field without one is left out."""
    return {
        name: note
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Range)
    }

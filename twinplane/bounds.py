"""The bounds of numbers that go through both planes, in one table: what the client edge accepts, no
worker refuses.

The protos say the same ranges in words. Bounds that only one plane knows stay with that plane, and
bounds that a worker reports (vocabulary, lengths, rows) are taken from its report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
        return f"{'(' if self.excludes_minimum else '['}{self.minimum}, {self.maximum}]"


SAMPLING_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "temperature": Range(0, 100),
        "top_k": Range(0, 2**31 - 1),
        "top_p": Range(0, 1, excludes_minimum=True),
        "min_p": Range(0, 1),
        "seed": Range(0, 2**64 - 1),
    }
)
"""Of every field of SamplingParameters, by name."""

WORKER_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message between a controller and a worker. Steps and prompts can exceed gRPC's own
default of 4 MB by far."""

MAX_EPOCH = 2**64 - 2
"""The largest epoch of a claim. A larger one would leave none for the next controller."""

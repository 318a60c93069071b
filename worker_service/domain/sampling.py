"""How tokens are drawn: one sequence's parameters, and the same of many as columns.

A sampling parameter is a field of the proto's SamplingParameters and of both classes here, by the
same name. Conversion, checks and the persistent columns go by those names.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn

FloatColumn = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Resolved: every field has a value. Temperature 0 is greedy, top_k 0 keeps all.

    The proto says what each means and what holds where it is unset; that is the default here.
    twinplane.bounds has the ranges.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """The parameters of n sequences, columns [n] on the host."""

    temperature: FloatColumn
    top_k: npt.NDArray[np.int64]
    top_p: FloatColumn
    min_p: FloatColumn
    seed: npt.NDArray[np.uint64]

    @classmethod
    def empty(cls, count: int) -> SamplingColumns:
        """Columns [count] to be filled."""
        return cls(
            temperature=np.zeros(count, dtype=np.float32),
            top_k=np.zeros(count, dtype=np.int64),
            top_p=np.zeros(count, dtype=np.float32),
            min_p=np.zeros(count, dtype=np.float32),
            seed=np.zeros(count, dtype=np.uint64),
        )

    def put(self, index: int, parameters: SamplingParameters) -> None:
        """Writes one sequence's parameters."""
        for name in PARAMETER_NAMES:
            getattr(self, name)[index] = getattr(parameters, name)

    def take(self, indices: IntColumn | npt.NDArray[np.int64]) -> SamplingColumns:
        """Those of some sequences, in order."""
        return SamplingColumns(**{name: getattr(self, name)[indices] for name in PARAMETER_NAMES})


PARAMETER_NAMES = tuple(field.name for field in fields(SamplingParameters))

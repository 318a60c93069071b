"""What sampling keeps of each row of the persistent batch, and what it takes from there. No torch.

Whatever else sampling has to remember of a row (counts for penalties, biases) belongs here, beside
the parameters: a row that asks for none of it costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import AddedSequence, StepPlan
from worker_service.domain.sampling import PARAMETER_RANGES, SamplingColumns
from worker_service.sampling.masks import MaskBatch


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """S tokens to be sampled: each by its sequence's parameters, at `positions` int32 [S] of the
    new tokens; `masks` of some of them."""

    parameters: SamplingColumns
    positions: IntColumn
    masks: MaskBatch | None = None


class SamplingState:
    """By row of the persistent batch. A row's entries hold from `add` on until it is added anew."""

    def __init__(self, row_count: int) -> None:
        self._parameters = SamplingColumns.empty(row_count)

    def check(self, plan: StepPlan) -> None:
        """Raises PlanInvalid when an added sequence's parameters are outside of their ranges."""
        for index, sequence in enumerate(plan.added):
            for name, allowed in PARAMETER_RANGES.items():
                if getattr(sequence.sampling, name) not in allowed:
                    raise PlanInvalid(
                        f"plan.added[{index}].sampling.{name}", f"must be in {allowed}"
                    )

    def add(self, sequence: AddedSequence) -> None:
        """Takes the sampling of a sequence that enters the batch. It has been checked."""
        self._parameters.put(sequence.row, sequence.sampling)

    def parameters(self, rows: IntColumn) -> SamplingColumns:
        """The parameters of `rows` int32 [n], any number of times each."""
        return self._parameters.take(rows)

    def gather(
        self, rows: IntColumn, positions: IntColumn, masks: MaskBatch | None = None
    ) -> SamplingBatch:
        """What tokens of `rows` int32 [S], any number of each, are sampled by."""
        return SamplingBatch(self.parameters(rows), positions, masks)

"""What sampling keeps for each row of the persistent batch, and what a step takes of it. No torch.

Anything more that sampling must remember of a row (counts for penalties, biases) belongs here,
beside the parameters. A row that asks for none of it must cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.bounds import SAMPLING_RANGES
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import AddedSequence, StepPlan
from worker_service.domain.sampling import SamplingColumns
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
        """Raises PlanInvalid when an added sequence's parameters are outside their ranges."""
        for index, sequence in enumerate(plan.added):
            for name, allowed in SAMPLING_RANGES.items():
                if getattr(sequence.sampling, name) not in allowed:
                    raise PlanInvalid(
                        f"plan.added[{index}].sampling.{name}",
                        f"must be in {allowed}",
                        (sequence.row,),
                    )

    def add(self, sequence: AddedSequence) -> None:
        """Takes the parameters of a sequence that enters the batch and that `check` has passed."""
        self._parameters.put(sequence.row, sequence.sampling)

    def parameters(self, rows: IntColumn) -> SamplingColumns:
        """The parameters of `rows` int32 [n]; a row may occur any number of times."""
        return self._parameters.take(rows)

    def gather(
        self, rows: IntColumn, positions: IntColumn, masks: MaskBatch | None = None
    ) -> SamplingBatch:
        """What it takes to sample a token for each of `rows` int32 [S]; a row may occur again."""
        return SamplingBatch(self.parameters(rows), positions, masks)

"""Two trees that take turns: in which order, and what their samples say."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from bench.results import Comparison

# Fewer rounds say too little about their own spread.
MIN_ROUNDS = 4


class Side(enum.Enum):
    OLD = "old"
    NEW = "new"


def order(number: int) -> tuple[Side, ...]:
    """The four turns of a round: drift that is steady favours neither side, nor does being first,
    since every other round is the other way round."""
    first, second = (Side.OLD, Side.NEW) if number % 2 == 0 else (Side.NEW, Side.OLD)
    return first, second, second, first


@dataclass(frozen=True, slots=True)
class Question:
    """What both sides are measured by: a quantity of a case, better when larger or when smaller."""

    case: str
    quantity: str
    unit: str
    larger_is_better: bool = False


@dataclass(slots=True, eq=False)
class Answers:
    """All samples of one question. A round's samples count as one value: within a round services
    live on, and what was luck with their memory stays."""

    samples: dict[Side, list[float]] = field(default_factory=lambda: {side: [] for side in Side})
    logs: list[float] = field(default_factory=list)

    def add(self, round_samples: Mapping[Side, Iterable[float]]) -> None:
        """One round: as many positive samples of one side as of the other."""
        means = {}
        for side, values in round_samples.items():
            taken = list(values)
            self.samples[side] += taken
            means[side] = statistics.fmean(map(math.log, taken))
        self.logs.append(means[Side.NEW] - means[Side.OLD])

    def median(self, side: Side) -> float:
        """Of one side's samples."""
        return statistics.median(self.samples[side])

    @property
    def ratio(self) -> float:
        """New over old: the geometric mean of the rounds' ratios."""
        return math.exp(statistics.fmean(self.logs))

    @property
    def error(self) -> float:
        """The standard error of `ratio`, relative; infinite after one round."""
        if len(self.logs) < 2:
            return math.inf
        return statistics.stdev(self.logs) / math.sqrt(len(self.logs))

    def compare(self, question: Question, old: str, new: str, tolerance: float) -> Comparison:
        """With the bound that the new side is at most `tolerance` worse. After one round nothing
        is known of the error, and there is no bound."""
        knows_error = math.isfinite(self.error)
        at_least = 1 - tolerance if knows_error and question.larger_is_better else None
        at_most = 1 + tolerance if knows_error and not question.larger_is_better else None
        return Comparison(
            question.case, new, old, question.quantity, self.ratio, at_least, at_most,
            self.error if knows_error else None,
        )  # fmt: skip


def is_settled(question: Question, answers: Answers, tolerance: float) -> bool:
    """Whether more rounds are needless: the error is below half the tolerance, and the ratio is
    farther from the bound than the error explains."""
    return (
        len(answers.logs) >= MIN_ROUNDS
        and answers.error <= tolerance / 2
        and answers.compare(question, "", "", tolerance).holds is not None
    )

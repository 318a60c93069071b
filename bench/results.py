"""What a benchmark finds: measurements and comparisons, as JSON lines at once and a table at last.

Every benchmark makes one Results and hands it to whatever measures. With `--save FOLDER` the lines
also go to FOLDER/NAME.jsonl, which bench/report.py reads.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

from bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Measurement:
    """One program in one case; `samples` in the order they were taken, in `unit`."""

    case: str
    program: str
    unit: str
    samples: tuple[float, ...]
    detail: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of one run, `ours` over `against`, and the bound it should keep.

    `error`: the ratio's relative standard error; None where it was not estimated.
    """

    case: str
    ours: str
    against: str
    quantity: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None
    error: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the bound is kept; None without one, or within two errors of it."""
        if self.at_least is None and self.at_most is None:
            return None
        low = -math.inf if self.at_least is None else self.at_least
        high = math.inf if self.at_most is None else self.at_most
        margin = 1 + 2 * (self.error or 0.0)
        least, most = self.ratio / margin, self.ratio * margin
        if low <= least and most <= high:
            return True
        return False if most < low or least > high else None

    @property
    def verdict(self) -> str:
        """For people."""
        if not self.bound:
            return ""
        return {True: "kept", False: "MISSED", None: "undecided"}[self.holds]

    @property
    def figure(self) -> str:
        """The ratio, with its error if there is one, for people."""
        if self.error is None:
            return f"{self.ratio:.3g}"
        return f"{self.ratio:.3f} ± {100 * self.error:.1f} %"

    @property
    def bound(self) -> str:
        """For people."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"


class Results:
    """Prints each record as one JSON line when it comes, and a table of all of them by `show`."""

    def __init__(self, benchmark: str, machine: Machine, folder: Path | None) -> None:
        self._benchmark = benchmark
        self._measurements: list[Measurement] = []
        self._comparisons: list[Comparison] = []
        self._file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{benchmark}.jsonl").open("w")
        self._write("machine", asdict(machine))

    def measured(
        self, case: str, program: str, unit: str, samples: Sequence[float], **detail: float
    ) -> Measurement:
        """Records one program's samples in one case."""
        rounded = {name: _rounded(value) for name, value in detail.items()}
        record = Measurement(case, program, unit, tuple(map(_rounded, samples)), rounded)
        self._measurements.append(record)
        self._write("measurement", {**asdict(record), "median": _rounded(record.median)})
        return record

    def compared(
        self,
        ours: Measurement,
        against: Measurement,
        quantity: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Records the ratio of two medians."""
        self.ratio(
            ours.case, ours.program, against.program, quantity, ours.median / against.median,
            at_least=at_least, at_most=at_most,
        )  # fmt: skip

    def ratio(
        self,
        case: str,
        ours: str,
        against: str,
        quantity: str,
        ratio: float,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Records a ratio that is made otherwise."""
        self.add(Comparison(case, ours, against, quantity, ratio, at_least, at_most))

    def add(self, comparison: Comparison) -> None:
        """Records a comparison."""
        error = None if comparison.error is None else _rounded(comparison.error)
        record = replace(comparison, ratio=_rounded(comparison.ratio), error=error)
        self._comparisons.append(record)
        self._write("comparison", {**asdict(record), "holds": record.holds})

    def note(self, text: str) -> None:
        """Says what was left out, or what to know when reading the figures."""
        self._write("note", {"text": text})

    def show(self) -> None:
        """Prints the tables and ends the file."""
        print(f"\n{self._benchmark}: medians")
        _table(
            [
                (each.case, each.program, f"{each.median:.4g}", each.unit, str(len(each.samples)))
                for each in self._measurements
            ],
            ("case", "program", "median", "unit", "samples"),
        )
        if self._comparisons:
            print(f"\n{self._benchmark}: ratios")
            _table(
                [
                    (each.case, f"{each.ours} / {each.against}", each.quantity,
                     each.figure, each.bound, each.verdict)
                    for each in self._comparisons
                ],
                ("case", "ours / against", "of", "ratio", "wanted", ""),
            )  # fmt: skip
        if self._file is not None:
            self._file.close()

    def _write(self, kind: str, record: dict[str, object]) -> None:
        line = json.dumps({"benchmark": self._benchmark, "kind": kind, **record})
        print(line, flush=True)
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()


def _rounded(value: float) -> float:
    """Five digits: more is noise."""
    return float(f"{value:.5g}")


def _table(rows: Sequence[tuple[str, ...]], titles: tuple[str, ...]) -> None:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )

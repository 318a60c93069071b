"""Draws what the benchmarks found: docs/benchmarks/README.md and a plot for each benchmark.

Reads the JSON lines that `--save docs/benchmarks/data` keeps, of all benchmarks, and writes ratios:
each against a named peer or floor of the same run, with the bound it should keep.

    python -m bench all --peers DIR --save docs/benchmarks/data
    python -m bench.report
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

from bench.__main__ import BENCHMARKS, Benchmark
from bench.machine import Machine
from bench.results import Comparison, Measurement

# Above this much use by others before a run, its section says that it is rough.
BUSY_PERCENT = 10.0
FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Run:
    """All of one benchmark's file."""

    name: str
    machine: Machine
    measurements: tuple[Measurement, ...]
    comparisons: tuple[Comparison, ...]
    notes: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where data/ is")
    folder: Path = parser.parse_args().folder
    runs = [read(path) for path in sorted((folder / "data").glob("*.jsonl"), key=_place)]
    if not runs:
        parser.error(f"no JSON lines in {folder / 'data'}: run `python -m bench all --save` there")
    # Not before: the other commands of this package need no matplotlib.
    from bench import plots

    drawn = [run for run in runs if run.comparisons]
    for run in drawn:
        plots.draw(run.name, run.machine, run.comparisons, folder / f"{run.name}.svg")
    (folder / "README.md").write_text(page(runs))
    print(f"{folder / 'README.md'} and {len(drawn)} plots")


def read(path: Path) -> Run:
    """Raises ValueError for a file that is none of ours."""
    machine: Machine | None = None
    measurements, comparisons, notes = [], [], []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        kind, name = record.pop("kind"), record.pop("benchmark")
        match kind:
            case "machine":
                machine = Machine(**record)
            case "measurement":
                del record["median"]
                measurements.append(Measurement(**{**record, "samples": tuple(record["samples"])}))
            case "comparison":
                del record["holds"]
                comparisons.append(Comparison(**record))
            case "note":
                notes.append(record["text"])
            case _:
                raise ValueError(f"{path.name}: {kind} of {name}")
    if machine is None:
        raise ValueError(f"{path.name} names no machine")
    return Run(path.stem, machine, tuple(measurements), tuple(comparisons), tuple(notes))


def page(runs: list[Run]) -> str:
    """The README: machines, then a table of ratios for each benchmark."""
    parts = [
        "# Benchmarks",
        "Written by `python -m bench.report` from `data/`. Every figure is a ratio of medians of "
        "one run in which ours and the other took turns on the same cores, the other's server "
        "frozen meanwhile, so the machine's speed mostly cancels out. The medians themselves, with "
        "all samples, are in `data/*.jsonl`. To repeat it: `make bench`, or "
        "`python -m bench all --peers DIR`; `python -m bench` lists what there is.",
        "Whether a change costs speed is another question: `make against REVISION=c8c383b` "
        "measures the working tree against 0.1.0, or against any other revision, in turns, until "
        "the ratio's error is small enough to say that it is at most 3 % slower. On two calm cores "
        "it takes half an hour to an hour. `ARGS` takes the flags of "
        "`python -m bench.against --help`; `ARGS=--quick` only shows that it runs.",
        _machines(runs),
        *(_section(run) for run in runs),
    ]
    return "\n\n".join(parts) + "\n"


def _machines(runs: list[Run]) -> str:
    rows = ["| benchmark | machine | date | busy before |", "|---|---|---|---|"]
    for run in runs:
        machine = run.machine
        where = f"{machine.cpu}, {machine.core_count} cores, {machine.memory_gigabytes} GB"
        rows.append(f"| {run.name} | {where} | {machine.date} | {machine.busy_percent:g} % |")
    versions: dict[str, str] = {}
    for run in runs:
        versions |= run.machine.versions
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "## Machine and versions\n\n" + "\n".join(rows) + f"\n\n{named}."


def _section(run: Run) -> str:
    lines = [f"## {run.name}"]
    described = {each.name: each.summary for each in (*BENCHMARKS, Benchmark("against"))}
    if summary := described.get(run.name, described.get(_family(run.name))):
        lines.append(summary)
    if run.comparisons:
        rows = ["| case | ours / against | of | ratio | wanted | |", "|---|---|---|---|---|---|"]
        rows += [_row(each) for each in run.comparisons]
        lines += ["\n".join(rows), f"![{run.name}: ratios]({run.name}.svg)"]
    else:
        lines.append("It has no peer: see its data.")
    if run.machine.busy_percent > BUSY_PERCENT:
        lines.append("Other programs used the cores: the ratios are rough, measure them again.")
    lines += [f"Note: {note}." for note in run.notes]
    return "\n\n".join(lines)


def _row(each: Comparison) -> str:
    verdict = "**missed**" if each.holds is False else each.verdict
    programs = f"{each.ours} / {each.against}"
    bound = each.bound.replace(">=", "≥").replace("<=", "≤")
    return f"| {each.case} | {programs} | {each.quantity} | {each.figure} | {bound} | {verdict} |"


def _family(name: str) -> str:
    """The benchmark whose variant this is: prefill_int8 and prefill_1024 are of prefill."""
    return re.sub(r"_(int8|\d+)$", "", name)


def _place(path: Path) -> tuple[int, str]:
    """In the order the benchmarks are listed; what is not listed last."""
    names = [each.name for each in BENCHMARKS]
    family = _family(path.stem)
    return (names.index(family) if family in names else len(names), path.stem)


if __name__ == "__main__":
    main()

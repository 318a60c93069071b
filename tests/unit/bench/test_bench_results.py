"""What benchmarks record is what the report reads and shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.machine import Machine
from bench.report import page, read
from bench.results import Comparison, Results

MACHINE = Machine("a cpu", 2, 16, "Linux x86_64", "2026-01-02", 0.5, {"twinplane": "1"})


def comparison(
    ratio: float, *, at_least: float | None = None, at_most: float | None = None
) -> Comparison:
    return Comparison("c", "ours", "peer", "rate", ratio, at_least, at_most)


@pytest.mark.parametrize(
    ("made", "holds"),
    [
        (comparison(1.7, at_least=1.7), True),
        (comparison(1.69, at_least=1.7), False),
        (comparison(0.2, at_most=0.2), True),
        (comparison(0.21, at_most=0.2), False),
        (comparison(9.0), None),
    ],
)
def test_a_bound_is_kept_up_to_its_edge(made: Comparison, holds: bool | None) -> None:
    assert made.holds is holds


@pytest.mark.parametrize(
    ("ratio", "error", "verdict"),
    [
        (1.0, 0.0, "kept"),
        (1.0, 0.014, "kept"),
        (1.0, 0.016, "undecided"),
        (1.03, 0.001, "undecided"),
        (1.05, 0.011, "undecided"),
        (1.05, 0.009, "MISSED"),
        (0.5, 0.4, "kept"),
    ],
)
def test_a_bound_within_two_errors_is_undecided(ratio: float, error: float, verdict: str) -> None:
    assert Comparison("c", "ours", "peer", "time", ratio, None, 1.03, error).verdict == verdict
    mirrored = Comparison("c", "ours", "peer", "rate", 1 / ratio, 1 / 1.03, None, error)
    assert mirrored.verdict == verdict


def test_a_ratio_is_of_medians(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results("prefill", MACHINE, tmp_path)
    ours = results.measured("one prompt", "twinplane", "tok/s", [90.0, 300.0, 310.0])
    peer = results.measured("one prompt", "peer", "tok/s", [100.0, 2000.0, 50.0])
    results.compared(ours, peer, "rate", at_least=3.5)
    results.note("a word")
    results.show()
    printed = capsys.readouterr().out
    lines = (tmp_path / "prefill.jsonl").read_text().splitlines()
    assert all(line in printed for line in lines)
    assert "MISSED" in printed
    last = json.loads(lines[-2])
    assert (last["kind"], last["ratio"], last["holds"]) == ("comparison", 3.0, False)


def test_the_report_shows_machine_ratio_verdict_and_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = Results("prefill", MACHINE, tmp_path)
    ours = results.measured("one prompt", "twinplane", "tok/s", [300.0], first_s=0.25)
    results.compared(ours, results.measured("one prompt", "peer", "tok/s", [100.0]), "rate")
    results.ratio("start", "twinplane", "6 s", "time", 1.5, at_most=1.0)
    results.add(Comparison("step", "new", "old", "time", 1.0101010, None, 1.03, 0.0123456))
    results.note("no second peer")
    results.show()
    run = read(tmp_path / "prefill.jsonl")
    assert run.machine == MACHINE
    assert run.measurements[0].detail == {"first_s": 0.25}
    shown = page([run])
    assert "| prefill | a cpu, 2 cores, 16 GB | 2026-01-02 | 0.5 % |" in shown
    assert "| one prompt | twinplane / peer | rate | 3 |  |  |" in shown
    assert "| start | twinplane / 6 s | time | 1.5 | ≤ 1 | **missed** |" in shown
    assert "| step | new / old | time | 1.010 ± 1.2 % | ≤ 1.03 | undecided |" in shown
    assert "Note: no second peer." in shown
    assert "Prompt rate on the CPU" in shown


def test_the_report_refuses_a_file_without_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "prefill.jsonl"
    path.write_text('{"benchmark": "prefill", "kind": "note", "text": "x"}\n')
    with pytest.raises(ValueError, match="names no machine"):
        read(path)

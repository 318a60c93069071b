"""`python -m bench` knows every benchmark, and each one's flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS, Benchmark, main
from tests.support.planes import ROOT


def test_every_benchmark_says_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [each.name for each in BENCHMARKS]
    assert all(len(line.split()) > 3 for line in listed)


def test_every_script_is_listed() -> None:
    scripts = {
        path.stem
        for path in (ROOT / "bench").glob("*.py")
        if "flags.open_results" in path.read_text()
    }
    assert scripts == {each.name for each in BENCHMARKS}


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prefil"])
    assert ended.value.code == 2
    assert "prefil" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_each_takes_the_flags_it_is_given(benchmark: Benchmark) -> None:
    source = Path(ROOT / "bench" / f"{benchmark.name}.py").read_text()
    assert ("peers=False" not in source) == benchmark.has_peers


def test_a_benchmark_runs_and_saves(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable, "-m", "bench.scheduler_cost", "--running", "1", "--rounds", "1",
            "--save", str(tmp_path),
        ],
        cwd=ROOT, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    assert '"kind": "measurement"' in (tmp_path / "scheduler_cost.jsonl").read_text()

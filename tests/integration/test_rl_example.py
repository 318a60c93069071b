"""The example of reinforcement learning runs, whichever way the weights go."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import tiny_llama

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("way", ["broadcast", "stream", "memory"])
def test_two_rounds(tmp_path: Path, way: str) -> None:
    model = tiny_llama.save(tiny_llama.llama(), tmp_path / "tiny")
    command = [sys.executable, "-m", "examples.rl_loop", "--model", str(model), "--rounds", "2"]
    command += ["--samples", "4", "--tokens", "5", "--way", way, "--learning-rate", "0.1"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"weights (\d+) ([0-9a-f]{12})", done.stdout)
    assert (first[0], second[0]) == ("2", "3")
    assert first[1] != second[1]
    assert re.search(r"updates took \d+ % of the time", done.stdout)

"""The model cache after processes that were killed in the middle of their work."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from twinplane.models.cache import ModelCache

SECONDS = 60.0
_MAKE = """
import sys, time
from pathlib import Path
from twinplane.models.cache import ModelCache

def make(folder):
    for number in range(40):
        (folder / f"part{number}").write_bytes(b"x" * 4096)
        print(number, flush=True)
        time.sleep(0.001)
    (folder / "config.json").write_text("{}")

ModelCache(Path(sys.argv[1])).get_or_make("m", make)
print("made", flush=True)
"""


def make(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    for number in range(40):
        (folder / f"part{number}").write_bytes(b"y")


@pytest.mark.parametrize("seed", range(12))
def test_a_folder_is_whole_or_not_there(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    cache = ModelCache(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", _MAKE, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env=plane_environment(),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for _ in range(rng.choice([0, 1, 5, 39, 40])):
            process.stdout.readline()
        time.sleep(rng.uniform(0, 0.002))
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
    found = cache.find("m")
    assert found is None or len(list(found.iterdir())) == 41
    folder = cache.get_or_make("m", make)  # and the lock is free
    assert len(list(folder.iterdir())) == 41
    assert not list((tmp_path / "staging").iterdir())

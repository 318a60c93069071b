"""The model cache after processes that were killed in the middle of their work."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from tests.support.quick import spread
from tests.unit.twinplane.tiny_gguf import TinyGguf
from twinplane.models import CacheUnusable, NoProgress
from twinplane.models.cache import ModelCache
from twinplane.models.store import ModelStore
from twinplane.models.wheel import download_wheel

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


@pytest.mark.parametrize("seed", spread(range(12), 3))
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


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond it fails, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 100, 400, 1000, 4000, 8000, 12_000, 50_000, 300_000])
def test_a_conversion_that_finds_no_room_says_so_and_leaves_nothing(
    size: int, tmp_path: Path
) -> None:
    source = tmp_path / "model.gguf"
    TinyGguf().write(source)
    store = ModelStore(ModelCache(tmp_path / "home"), download_wheel)
    with files_of_at_most(size), pytest.raises(CacheUnusable, match="TWINPLANE_HOME") as refused:
        store.resolve(str(source), NoProgress())
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "home" / "staging").iterdir())
    assert store.resolve(str(source), NoProgress()).is_dir()


def test_a_cache_that_is_read_only_serves_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.gguf"
    TinyGguf().write(source)
    store = ModelStore(ModelCache(tmp_path / "home"), download_wheel)
    made = store.resolve(str(source), NoProgress())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    assert store.resolve(str(source), NoProgress()) == made

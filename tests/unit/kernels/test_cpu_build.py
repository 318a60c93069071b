"""The kernels' build: once per cache, whole or not at all, and a reason where it cannot be."""

from __future__ import annotations

import errno
import fcntl
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from worker_service.kernels.cpu import compiler
from worker_service.kernels.cpu.compiler import (
    KernelsUnavailable,
    default_cache,
    ensure_library,
    find_toolchain,
)
from worker_service.kernels.cpu.library import Context, InstructionSet
from worker_service.kernels.cpu.ops import instruction_set_for


def fake_compiler(folder: Path, body: str) -> dict[str, str]:
    """An environment whose CXX is a shell script that logs each call."""
    script = folder / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
        f'echo "$@" >> {folder}/calls\n{body}\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"CXX": str(script)}


MAKES_OUTPUT = 'while [ "$1" != -o ]; do shift; done\necho made > "$2"'


def test_builds_once_and_says_so(tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, MAKES_OUTPUT)
    lines: list[str] = []
    first = ensure_library(tmp_path / "cache", lines.append, environment)
    calls = (tmp_path / "calls").read_text()
    second = ensure_library(tmp_path / "cache", lines.append, environment)
    assert first == second and first.read_text() == "made\n"
    assert (tmp_path / "calls").read_text() == calls
    assert len(lines) == 1 and "fake 1.0" in lines[0]
    assert sorted(path.name for path in first.parent.iterdir()) == sorted([first.name, "lock"])


def test_another_compiler_builds_anew(tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, MAKES_OUTPUT)
    first = ensure_library(tmp_path / "cache", lambda line: None, environment)
    script = Path(environment["CXX"])
    script.write_text(script.read_text().replace("fake 1.0", "fake 2.0"))
    assert ensure_library(tmp_path / "cache", lambda line: None, environment) != first


def test_without_a_compiler_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        ensure_library(tmp_path, lambda line: None, {})


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="does not run"):
        ensure_library(tmp_path, lambda line: None, {"CXX": str(tmp_path / "nothing")})


def test_a_failed_build_leaves_nothing_and_tells_why(tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, 'echo "file.cpp:1: error: no such thing" >&2; exit 1')
    with pytest.raises(KernelsUnavailable, match="error: no such thing"):
        ensure_library(tmp_path / "cache", lambda line: None, environment)
    assert not list((tmp_path / "cache").rglob("*.so"))
    assert not list((tmp_path / "cache").rglob("*.o"))


def test_processes_at_once_build_once(tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, "sleep 0.02\n" + MAKES_OUTPUT)
    code = (
        "from pathlib import Path; from worker_service.kernels.cpu.compiler import ensure_library;"
        f"ensure_library(Path({str(tmp_path / 'cache')!r}), print, {environment!r})"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum("compiling" in output for output in outputs) == 1


def test_an_unwritable_cache_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelsUnavailable, match="cannot be written"):
        ensure_library(tmp_path / "file", lambda line: None, fake_compiler(tmp_path, MAKES_OUTPUT))


def test_a_prebuilt_library_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "prebuilt")
    made = compiler.prebuild(fake_compiler(tmp_path, MAKES_OUTPUT))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ensure_library(tmp_path / "cache", lambda line: None, {}) == made


def test_a_library_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "lib.so"
    broken.write_text("not a library")
    with pytest.raises(KernelsUnavailable, match="does not load"):
        Context(broken, 1, None)


def test_cache_folders() -> None:
    assert default_cache({"TWINPLANE_HOME": "/home/t"}) == Path("/home/t/kernels")
    assert default_cache({"XDG_CACHE_HOME": "/c"}) == Path("/c/twinplane/kernels")
    assert default_cache({"TWINPLANE_HOME": "~/t"}) == Path.home() / "t" / "kernels"
    assert default_cache({}) == Path.home() / ".cache" / "twinplane" / "kernels"


def test_odd_heads_take_narrower_vectors() -> None:
    every = dict(zip(InstructionSet, (4, 8, 16, 16), strict=True))
    assert instruction_set_for(64, every) is InstructionSet.AVX512_VNNI
    assert instruction_set_for(8, every) is InstructionSet.AVX2
    assert instruction_set_for(20, every) is InstructionSet.PORTABLE
    for head_dim in (6, 260, 512):
        with pytest.raises(KernelsUnavailable, match="head_dim"):
            instruction_set_for(head_dim, every)


@pytest.mark.parametrize("calls", [1, 3])
def test_a_killed_build_is_built_again(calls: int, tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, f"[ -e {tmp_path}/quick ] || sleep 0.2\n{MAKES_OUTPUT}")
    code = (
        "from pathlib import Path; from worker_service.kernels.cpu.compiler import ensure_library;"
        f"ensure_library(Path({str(tmp_path / 'cache')!r}), print, {environment!r})"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as building:
        log = tmp_path / "calls"
        while not log.exists() or len(log.read_text().splitlines()) < calls:
            assert building.poll() is None
        compilers = psutil.Process(building.pid).children()
        building.kill()
    psutil.wait_procs(compilers, timeout=60)  # they outlive it by what they were doing
    (tmp_path / "quick").touch()
    assert list((tmp_path / "cache").rglob("building-*"))
    library = ensure_library(tmp_path / "cache", lambda line: None, environment)
    assert sorted(path.name for path in library.parent.iterdir()) == sorted([library.name, "lock"])


def test_a_built_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may have the kernels and no compiler."""
    made = ensure_library(tmp_path, lambda line: None, fake_compiler(tmp_path, MAKES_OUTPUT))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ensure_library(tmp_path, lambda line: None, {}) == made
    assert ensure_library(tmp_path, lambda line: None, {"CXX": "/no/such/compiler"}) == made


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    other = tmp_path / "cache" / "of another" / "building-x"
    other.mkdir(parents=True)
    made = ensure_library(
        tmp_path / "cache", lambda line: None, fake_compiler(tmp_path, MAKES_OUTPUT)
    )
    assert made.is_file() and other.is_dir()


def test_without_a_cache_there_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match="set TWINPLANE_HOME"):
        ensure_library(None, lambda line: None, fake_compiler(tmp_path, MAKES_OUTPUT))


@pytest.mark.parametrize(
    "value", ['"', "'g++", "   ", "g++ --no-such-flag-at-all", "/", "/dev/null", "true", "false"]
)
def test_any_cxx_is_a_compiler_or_a_reason(value: str, tmp_path: Path) -> None:
    try:
        found = find_toolchain({"CXX": value})
    except KernelsUnavailable as unavailable:
        assert "\n" not in str(unavailable)
    else:
        assert found.command


def test_the_compilers_own_files_go_where_the_library_is_built(tmp_path: Path) -> None:
    environment = fake_compiler(tmp_path, f'echo "$TMPDIR" >> {tmp_path}/tmp\n{MAKES_OUTPUT}')
    library = ensure_library(tmp_path / "cache", lambda line: None, environment)
    folders = set((tmp_path / "tmp").read_text().splitlines())
    assert {Path(folder).parent for folder in folders} == {library.parent}


TOO_MANY_THREADS = """
import os, resource
from worker_service.kernels.cpu.compiler import KernelsUnavailable, default_cache, ensure_library
from worker_service.kernels.cpu.library import Context
path = ensure_library(default_cache(os.environ), print, os.environ)
Context(path, 2, None).close()
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Context(path, 1024, None)
except KernelsUnavailable as unavailable:
    print(unavailable)
"""


def test_threads_that_the_system_refuses_are_an_error_not_an_end() -> None:
    """A container may allow few processes; here their stacks have no room."""
    done = subprocess.run(
        ["bash", "-c", 'ulimit -s 8192 && exec "$0" -c "$1"', sys.executable, TOO_MANY_THREADS],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "with 1024 threads cannot be opened" in done.stdout

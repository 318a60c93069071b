"""The whole library under the address and undefined-behaviour sanitizers, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker_service.kernels.cpu.compiler import (
    KernelsUnavailable,
    Toolchain,
    build_library,
    find_toolchain,
)

ROOT = Path(__file__).resolve().parents[3]
OPTIONS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


def toolchain() -> Toolchain:
    try:
        return find_toolchain(os.environ)
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.slow
def test_random_calls_are_clean(tmp_path: Path) -> None:
    compiler = toolchain()
    library = tmp_path / "libsanitized.so"
    build_library(library, compiler, options=OPTIONS)
    runtime = subprocess.run(
        [*compiler.command, "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    ).stdout.strip()
    environment = os.environ | {
        "LD_PRELOAD": str(Path(runtime).resolve()),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "PYTHONPATH": str(ROOT),
        "PYTHONMALLOC": "malloc",
    }
    script = Path(__file__).with_name("sanitized_cases.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(library), "20"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip() == "clean"

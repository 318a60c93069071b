"""Compiles the CPU kernels once per source, compiler and machine, into a cache folder.

The library holds every instruction set of the architecture and picks one when it is opened, so
one build serves any CPU of that architecture and can be made when a wheel is built: see
`build_library`. Needs only a C++17 compiler; never imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from twinplane.models import CacheUnusable, cache_root
from worker_service.threads import resolve_threads

SOURCES = Path(__file__).resolve().parent / "src"
PREBUILT = Path(__file__).resolve().parent / "prebuilt"
LIBRARY_NAME = "libtwinplane_cpu.so"

_FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_ONCE = ("runtime", "dispatch")
_PER_INSTRUCTION_SET = (
    "table",
    "linear",
    "linear_int8",
    "pack",
    "elementwise",
    "rope",
    "attention",
    "adapters",
    "decoder",
)
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
_X86_SETS = {
    0: (),
    1: ("-mavx2", "-mfma"),
    2: _AVX512,
    3: (*_AVX512, "-mavx512vnni"),
}
_OTHER_SETS: dict[int, tuple[str, ...]] = {0: ()}
_COMPILE_SECONDS = 600.0
_BUILDING = "building-"

Progress = Callable[[str], None]


class KernelsUnavailable(Exception):
    """The compiled kernels cannot serve here; the message is the reason, in one sentence."""


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A C++ compiler as a command, and what it says of itself."""

    command: tuple[str, ...]
    version: str


def find_toolchain(environment: Mapping[str, str]) -> Toolchain:
    """The compiler that CXX names, else the first of g++, clang++, c++ on the path.

    Raises KernelsUnavailable where there is none or it does not run.
    """
    named = environment.get("CXX", "").strip()
    found = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
    try:
        command = tuple(shlex.split(named)) if named else (found,) if found else ()
    except ValueError as error:
        raise KernelsUnavailable(f"CXX is no command: {named!r} ({error})") from error
    if not command:
        raise KernelsUnavailable("no C++ compiler was found (install g++ or set CXX)")
    try:
        answer = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelsUnavailable(f"the C++ compiler {command[0]} does not run: {error}") from error
    return Toolchain(command, answer.stdout.splitlines()[0] if answer.stdout else "unknown")


def source_digest() -> str:
    """Hex digest over every source file, the flags and the machine's architecture."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    digest.update(repr((_FLAGS, _X86_SETS, _OTHER_SETS, platform.machine())).encode())
    return digest.hexdigest()[:16]


def default_cache(environment: Mapping[str, str]) -> Path | None:
    """The kernels' folder, beside the models' (see `twinplane.models.cache_root`).

    None where there is no cache, because the user has no home folder.
    """
    try:
        return cache_root(environment) / "kernels"
    except CacheUnusable:
        return None


def ensure_library(cache: Path | None, progress: Progress, environment: Mapping[str, str]) -> Path:
    """The library's path: prebuilt, cached or built now (some seconds, one progress line).

    Where no compiler is left, a library serves that any compiler has built of these sources. Safe
    in several processes at once. Raises KernelsUnavailable with the reason otherwise.
    """
    digest = source_digest()
    prebuilt = PREBUILT / digest / LIBRARY_NAME
    if prebuilt.is_file():
        return prebuilt
    if cache is None:
        raise KernelsUnavailable(
            "the kernel cache has no place, for this user has no home folder: "
            "set TWINPLANE_HOME to a folder that can be written"
        )
    try:
        toolchain = find_toolchain(environment)
    except KernelsUnavailable:
        built = sorted(cache.glob(f"{digest}-*/{LIBRARY_NAME}"))
        if not built:
            raise
        return built[0]
    version = hashlib.sha256(toolchain.version.encode()).hexdigest()[:8]
    folder = cache / f"{digest}-{version}"
    library = folder / LIBRARY_NAME
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock") as is_alone:
            if not library.is_file():
                if is_alone:
                    _remove_unfinished(folder)
                progress(f"compiling the CPU kernels with {toolchain.version} (once)")
                build_library(library, toolchain)
    except OSError as error:
        raise KernelsUnavailable(
            f"the kernel cache cannot be written: {error}; "
            "set TWINPLANE_HOME to a folder that can be"
        ) from error
    return library


def build_library(
    library: Path, toolchain: Toolchain, *, options: tuple[str, ...] = ("-O3",)
) -> None:
    """Compiles every source and links them into `library`, which appears whole or not at all.

    `options` are added to every compilation and to the link. Raises KernelsUnavailable with the
    compiler's first complaint.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    sets = _X86_SETS if platform.machine() in ("x86_64", "AMD64") else _OTHER_SETS
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=library.parent) as folder:
        objects = Path(folder)
        compilations = [
            (
                *_FLAGS,
                *options,
                "-c",
                str(SOURCES / f"{name}.cpp"),
                "-o",
                str(objects / f"{name}.o"),
            )
            for name in _ONCE
        ] + [
            (
                *(*_FLAGS, *options, *flags, f"-DTWK_ISA={number}"),
                *("-c", str(SOURCES / f"{name}.cpp"), "-o", str(objects / f"{name}.{number}.o")),
            )
            for number, flags in sets.items()
            for name in _PER_INSTRUCTION_SET
        ]
        with ThreadPoolExecutor(max_workers=resolve_threads(None).count) as pool:
            list(pool.map(lambda each: _compile(toolchain, each, objects), compilations))
        linked = objects / LIBRARY_NAME
        parts = sorted(map(str, objects.glob("*.o")))
        _compile(toolchain, (*options, "-shared", "-pthread", *parts, "-o", str(linked)), objects)
        if not linked.is_file():
            raise KernelsUnavailable(f"{toolchain.command[0]} says nothing, and makes no library")
        linked.replace(library)


def prebuild(environment: Mapping[str, str]) -> Path:
    """Builds into the package itself, for a platform wheel; returns the library's path."""
    library = PREBUILT / source_digest() / LIBRARY_NAME
    build_library(library, find_toolchain(environment))
    return library


def _compile(toolchain: Toolchain, arguments: tuple[str, ...], temporary: Path) -> None:
    """Runs the compiler, whose own temporary files go into the folder `temporary`."""
    try:
        subprocess.run(
            [*toolchain.command, *arguments],
            # The complaint is looked for in English.
            env={**os.environ, "TMPDIR": str(temporary), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_COMPILE_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = str(error.stderr).splitlines()
        complaint = next((line for line in lines if "error" in line), "no message")
        raise KernelsUnavailable(f"the CPU kernels do not compile: {complaint}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"the CPU kernels do not compile: {error}") from error


def _remove_unfinished(folder: Path) -> None:
    """Removes what builds left there that were killed. Nobody else may be building."""
    for left in folder.glob(f"{_BUILDING}*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether no other process is inside: file systems without locks let several build at once."""
    with path.open("w") as file:
        is_alone = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when the process ends
            is_alone = True
        yield is_alone

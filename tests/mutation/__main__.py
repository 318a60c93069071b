"""Plants bugs in the control plane, one at a time, and says which of them its tests catch.

    python -m tests.mutation [NAME …] [--kind core|fleet] [--least 28] [--jobs 2]

Each bug is planted in a copy of the tree, and tests run in it: of the core its unit tables and the
state machines, of the fleet those of the shell and the simulation, too. A test that fails, or does
not end, has caught the bug. Tests judge only after they passed in a copy without a bug. Exits with
1 when fewer of a kind are caught than asked for, and with 2 when tests fail without a bug.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Lock

from tests.mutation.fleet_mutants import FLEET_MUTANTS
from tests.mutation.mutants import MUTANTS, Mutant
from tests.support.quick import UNSHRUNK

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("control_plane", "twinplane", "tests", "pyproject.toml")
# The tables first: they take seconds and catch nearly all.
_CORE = [f"tests/unit/core/test_{name}.py" for name in ("fleet_decisions", "placement")]
_SHELL = [f"tests/unit/shell/test_{name}.py" for name in ("moves", "roster", "two_replicas")]
SUITES = {
    "core": (("tests/unit/core",), ("tests/property",)),
    "fleet": (
        (*_CORE, *_SHELL),
        ("tests/unit/core", "tests/unit/shell"),
        ("tests/property",),
        ("tests/simulation",),
    ),
}
_FLAGS = (
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-m",
    "not slow",
    f"--hypothesis-profile={UNSHRUNK}",
)
PATIENCE = 4
"""How much more a suite may compute with a planted bug, before it counts as one that does not end;
and PATIENCE_SECONDS on top. Seconds of CPU time: how busy the machine is does not matter. A test
that waits and computes nothing ends by pytest's own timeout, and has failed."""
PATIENCE_SECONDS = 20


class SuiteFails(Exception):
    """Tests fail without any planted bug: with one, their failure would mean nothing."""


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """A folder with what the tests of the control plane need."""
    with tempfile.TemporaryDirectory(prefix="twinplane-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        yield tree


def failure(suite: tuple[str, ...], tree: Path, cpu_seconds: int | None) -> str | None:
    """The first test of a suite that fails in a copy of the tree; None when all pass.

    Raises RuntimeError if the tests can't be run.
    """
    limit = "unlimited" if cpu_seconds is None else str(cpu_seconds)
    command = ["sh", "-c", 'ulimit -S -t "$0" && exec "$@"', limit]
    command += [sys.executable, "-m", "pytest", *_FLAGS, *suite]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if run.returncode == 0:
        return None
    if run.returncode == -signal.SIGXCPU:
        return f"{suite[-1]}, which does not end"
    failed = [line[7:].split(" - ")[0] for line in run.stdout.splitlines() if line[:7] == "FAILED "]
    if run.returncode != 1 or not failed:
        # No test has run to its end: for all we know the mutant can't even be imported.
        raise RuntimeError(f"{command} ended with {run.returncode}: {run.stdout[-2000:]}")
    return failed[0]


class Suites:
    """The suites of a kind, in order, each tried without a planted bug before it judges one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._limits: dict[tuple[str, ...], int] = {}
        self._lock = Lock()

    def limits(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Each suite, and how many seconds it may compute.

        Raises SuiteFails if one fails without a bug. As most bugs are caught by the first, the
        others are tried when they are asked for.
        """
        for suite in SUITES[self._kind]:
            with self._lock:
                if suite not in self._limits:
                    self._limits[suite] = self._try(suite)
            yield suite, self._limits[suite]

    def _try(self, suite: tuple[str, ...]) -> int:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with copy_of_the_tree() as tree:
            failed = failure(suite, tree, None)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if failed is not None:
            raise SuiteFails(f"{failed} fails without any planted bug")
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{self._kind}: {suite[-1]} passes without a bug ({seconds:.0f} s CPU)", flush=True)
        return PATIENCE_SECONDS + PATIENCE * math.ceil(seconds)


def judge(mutant: Mutant, suites: Suites) -> bool:
    """Plants one bug in a copy of its own and prints the outcome."""
    started = time.monotonic()
    with copy_of_the_tree() as tree:
        mutant.plant(tree)
        failures = (failure(suite, tree, limit) for suite, limit in suites.limits())
        caught = next((failed for failed in failures if failed is not None), None)
    outcome = f"caught by {caught}" if caught else "NOT CAUGHT"
    print(f"{mutant.name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    return caught is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="these only")
    parser.add_argument("--kind", choices=("core", "fleet"), help="without: both")
    parser.add_argument(
        "--least", type=int, default=28, help="how many of a kind have to be caught"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    enough = True
    for kind, mutants in {"core": MUTANTS, "fleet": FLEET_MUTANTS}.items():
        chosen = [m for m in mutants if not options.names or m.name in options.names]
        if not chosen or options.kind not in (None, kind):
            continue
        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                caught = sum(pool.map(partial(judge, suites=Suites(kind)), chosen))
        except SuiteFails as error:
            print(f"{kind}: this judges nothing: {error}")
            return 2
        print(f"{kind}: {caught} of {len(chosen)} planted bugs were caught")
        enough &= caught >= min(options.least, len(chosen))
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())

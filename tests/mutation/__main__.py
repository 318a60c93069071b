"""Plants bugs in the control plane, one at a time, and says which of them its tests catch.

    python -m tests.mutation [NAME …] [--kind core|fleet] [--least 28] [--jobs 2]

Each bug is planted in a copy of the tree, and tests run in it: of the core its unit tables and the
state machines, of the fleet those of the shell and the simulation, too. A test that fails, or does
not end, has caught the bug. First all of them have to pass in a copy without a bug: else nothing is
judged. Exits with 1 when fewer of a kind are caught than asked for, and with 2 when nothing could
be judged.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.mutation.fleet_mutants import FLEET_MUTANTS
from tests.mutation.mutants import MUTANTS, Mutant
from tests.support.quick import UNSHRUNK

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("control_plane", "twinplane", "tests", "pyproject.toml")
# The tables first: they take seconds and catch nearly all. Of a file named twice, once.
_CORE = [f"tests/unit/core/test_{name}.py" for name in ("fleet_decisions", "placement")]
_SHELL = [f"tests/unit/shell/test_{name}.py" for name in ("moves", "roster", "two_replicas")]
SUITES = {
    "core": (("tests/unit/core",), ("tests/property",)),
    "fleet": (
        (*_CORE, *_SHELL, "tests/unit/core", "tests/unit/shell"),
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
SUITE_SECONDS = 600.0
"""Of a suite without a planted bug."""
PATIENCE = 4.0
"""How much longer it may take with one, before it counts as one that does not end."""
_STARTING_SECONDS = 30.0
"""What is granted on top, for a machine that is busy."""


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


def failure(suite: tuple[str, ...], tree: Path, seconds: float) -> str | None:
    """The first test of a suite that fails in a copy of the tree; None when all pass.

    Raises RuntimeError if the tests can't be run.
    """
    command = [sys.executable, "-m", "pytest", *_FLAGS, *suite]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"{suite[-1]}, which does not end"
    if run.returncode == 0:
        return None
    failed = [line[7:].split(" - ")[0] for line in run.stdout.splitlines() if line[:7] == "FAILED "]
    if run.returncode != 1 or not failed:
        # No test has run to its end: for all we know the mutant can't even be imported.
        raise RuntimeError(f"{command} ended with {run.returncode}: {run.stdout[-2000:]}")
    return failed[0]


def limits_of(kind: str) -> list[float]:
    """How many seconds each suite may take, by what it takes without a planted bug.

    Raises SuiteFails if one fails there.
    """
    limits = []
    with copy_of_the_tree() as tree:
        for suite in SUITES[kind]:
            started = time.monotonic()
            failed = failure(suite, tree, SUITE_SECONDS)
            seconds = time.monotonic() - started
            if failed is not None:
                raise SuiteFails(f"{failed} fails without any planted bug")
            print(f"{kind}: {suite[-1]} passes without a bug ({seconds:.0f} s)", flush=True)
            limits.append(_STARTING_SECONDS + PATIENCE * seconds)
    return limits


def judge(mutant: Mutant, kind: str, limits: list[float]) -> bool:
    """Plants one bug in a copy of its own and prints the outcome."""
    started = time.monotonic()
    with copy_of_the_tree() as tree:
        mutant.plant(tree)
        tries = zip(SUITES[kind], limits, strict=True)
        failures = (failure(suite, tree, seconds) for suite, seconds in tries)
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
            limits = limits_of(kind)
        except SuiteFails as error:
            print(f"{kind}: nothing is judged, because {error}")
            return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            judged = partial(judge, kind=kind, limits=limits)
            caught = sum(pool.map(judged, chosen))
        print(f"{kind}: {caught} of {len(chosen)} planted bugs were caught")
        enough &= caught >= min(options.least, len(chosen))
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())

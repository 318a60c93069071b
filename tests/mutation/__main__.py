"""Plants bugs in the control plane, one at a time, and says which of them its tests catch.

    python -m tests.mutation [NAME …] [--kind core|fleet] [--least 28] [--jobs 2]

Each bug is planted in a copy of the tree, and tests run in it: of the core its unit tables and its
state machines, of the fleet those of the shell and the simulation, too. A run that fails, or does
not end, has caught the bug. Exits with 1 when fewer of a kind are caught than asked for.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutation.fleet_mutants import FLEET_MUTANTS
from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("control_plane", "twinplane", "tests", "pyproject.toml")
# The tables first: they take seconds and catch the most.
_SHELL = [f"tests/unit/shell/test_{name}.py" for name in ("moves", "two_replicas", "fleet")]
SUITES = {
    "core": (("tests/unit/core",), ("tests/property",)),
    "fleet": (
        ("tests/unit/core/test_fleet_decisions.py", *_SHELL, "-m", "not slow"),
        ("tests/simulation/test_chaos.py", "-k", "chaos_loses", "-m", "not slow"),
        ("tests/property/test_fleet_machine.py", "--hypothesis-profile=quick"),
        ("tests/simulation", "tests/unit/core", "tests/unit/shell", "-m", "not slow"),
    ),
}
SUITE_SECONDS = 240.0


def caught_by(mutant: Mutant, tree: Path, kind: str) -> str | None:
    """The suite that notices the planted bug; None when all pass."""
    mutant.plant(tree)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    for suite in SUITES[kind]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *suite]
        try:
            run = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, timeout=SUITE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"{suite[0]} (does not end)"
        if run.returncode == 1:
            return suite[0]
        if run.returncode != 0:
            raise RuntimeError(f"{mutant.name}: {run.stdout.decode()[-2000:]}")
    return None


def judge(mutant: Mutant, kind: str) -> bool:
    """Plants one bug in a copy of its own and prints the outcome."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twinplane-mutant-") as folder:
        tree = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, tree / name)
        suite = caught_by(mutant, tree, kind)
    outcome = f"caught by {suite}" if suite else "NOT CAUGHT"
    print(f"{mutant.name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    return suite is not None


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
        with ThreadPoolExecutor(options.jobs) as pool:
            caught = sum(pool.map(lambda mutant, kind=kind: judge(mutant, kind), chosen))
        print(f"{kind}: {caught} of {len(chosen)} planted bugs were caught")
        enough &= caught >= min(options.least, len(chosen))
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main())

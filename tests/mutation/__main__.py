"""Plants bugs in the control core, one at a time, and says which of them its tests catch.

    python -m tests.mutation [NAME …] [--least 28] [--jobs 2]

Each bug is planted in a copy of the tree, in which the core's unit tables and its state machines
run. A run that fails, or does not end, has caught the bug. Exits with 1 when fewer are caught than
asked for.
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

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("control_plane", "twinplane", "tests", "pyproject.toml")
# The tables first: they take seconds and catch the most.
SUITES = (("tests/unit/core",), ("tests/property",))
SUITE_SECONDS = 240.0


def caught_by(mutant: Mutant, tree: Path) -> str | None:
    """The suite that notices the planted bug; None when all pass."""
    mutant.plant(tree)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    for suite in SUITES:
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


def judge(mutant: Mutant) -> bool:
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
        suite = caught_by(mutant, tree)
    outcome = f"caught by {suite}" if suite else "NOT CAUGHT"
    print(f"{mutant.name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
    return suite is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="these only")
    parser.add_argument("--least", type=int, default=28, help="how many have to be caught")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]
    with ThreadPoolExecutor(options.jobs) as pool:
        caught = sum(pool.map(judge, chosen))
    print(f"{caught} of {len(chosen)} planted bugs were caught")
    return 0 if caught >= min(options.least, len(chosen)) else 1


if __name__ == "__main__":
    sys.exit(main())

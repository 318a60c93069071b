"""Simulates whole systems, one seed after another, and says which invariants break.

    python -m tests.simulation [--first 0] [--seeds 1000] [--minutes 10]

A seed draws workers, requests and what goes wrong. A failure prints its seed and the shortest run
that still fails. Exits with 1 when a seed failed. `make simulate ARGS='--seeds 10000'`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from itertools import count

from tests.simulation.shrink import first_failure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="how many; without --minutes: 1000")
    parser.add_argument("--minutes", type=float, help="for how long; without: until all are played")
    parser.add_argument("--most-failures", type=int, default=10, help="stop after so many")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seed_count = options.seeds
    if seed_count is None and options.minutes is None:
        seed_count = 1000
    started = time.monotonic()
    failures: Counter[str] = Counter()
    played = 0
    for seed in count(options.first):
        minutes = (time.monotonic() - started) / 60
        if played == seed_count or (options.minutes is not None and minutes >= options.minutes):
            break
        failure = first_failure(seed)
        played += 1
        if failure is not None:
            failures[failure.what] += 1
            print(failure.report(), flush=True)
            if failures.total() >= options.most_failures:
                break
        if played % 500 == 0:
            print(f"{played} seeds, {failures.total()} failures, {minutes:.1f} minutes", flush=True)
    seconds = time.monotonic() - started
    print(f"{played} seeds from {options.first}: {failures.total()} failed ({seconds:.0f} s)")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

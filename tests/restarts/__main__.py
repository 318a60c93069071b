"""The control plane killed and restarted, under clients that resume: nothing may be lost.

Two of three are killed, the third is told to stop, with less time than its streams need.

    python -m tests.restarts [--kills 50] [--clients 16] [--seed N] [--model NAME]

Without --model a simulated worker answers. Prints what was lost, doubled or changed, how long a
restart takes, and how long the streams paused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.restarts.kills import Report, planes, run
from tests.support.tiny_model import write_tiny_model

SIMULATED = ("--simulate", "--simulate-vocabulary-size", "259", "--simulate-step-ms", "10")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.restarts")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--model", default="")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = options.model or str(write_tiny_model(folder / "tiny"))
        flags = () if options.model else SIMULATED
        with planes(folder, model, flags) as killed:
            report = asyncio.run(
                run(killed, kills=options.kills, clients=options.clients, seed=options.seed)
            )
    tell(report)
    return 1 if report.differences else 0


def tell(report: Report) -> None:
    """Prints the figures."""
    tokens = sum(len(one.token_ids) for one in report.seen)
    pauses = sorted(max(one.pauses, default=0.0) for one in report.seen)
    print(
        f"{len(report.seen)} generations of {tokens} tokens, {len(report.brought)} of them ended "
        f"behind {sum(report.brought)} tokens that they brought"
    )
    print(
        f"a restart: median {statistics.median(report.recoveries):.2f} s, "
        f"longest {max(report.recoveries):.2f} s; of it, from listening to the worker's claim: "
        f"median {statistics.median(report.claims):.3f} s, longest {report.claims[-1]:.3f} s"
    )
    print(f"the longest pause of a stream: {pauses[-1]:.2f} s")
    for difference in report.differences[:10]:
        print(difference)
    print(f"{len(report.differences)} generations differ from undisturbed ones")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

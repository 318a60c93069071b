"""Rolls weights out under streams, and kills processes meanwhile: every token must be its weights'.

    python -m tests.rollouts [update] [kill] [real] [--times 100] [--streams 16] [--seed N]

Two workers and a control plane, as processes; each policy for what is in flight and both strategies
take turns. `update` and `kill` have simulated workers, `real` those of a tiny random model or of
--model FOLDER, and compares their answers with those of servers that are fresh. Prints a line of
JSON for each trial; exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.rollouts.real import real_trial
from tests.rollouts.trials import Report, simulated_trial

TRIALS = ("update", "kill", "real")
_TIMES = {"update": 100, "kill": 50, "real": 16}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.rollouts")
    made.add_argument("trials", nargs="*", help=f"some of {', '.join(TRIALS)}; none: all")
    made.add_argument(
        "--times", type=int, help="updates of each trial (default: 100, 50 kills, 16 real)"
    )
    made.add_argument("--streams", type=int, default=16)
    made.add_argument("--tokens", type=int, default=120, help="the most of a stream")
    made.add_argument("--model", type=Path, help="a folder, for `real`")
    made.add_argument("--seed", type=int, default=0)
    return made


async def run(options: argparse.Namespace) -> list[Report]:
    """All trials that were asked for, each with processes of its own."""
    reports = []
    for trial in options.trials or TRIALS:
        with tempfile.TemporaryDirectory(prefix="twinplane-rollouts-") as name:
            how = {
                "times": options.times or _TIMES[trial],
                "streams": options.streams,
                "tokens": options.tokens,
                "seed": options.seed,
            }
            if trial == "real":
                report = await real_trial(options.model, Path(name), **how)
            else:
                report = await simulated_trial(trial, Path(name), **how)
        print(report.line(), flush=True)
        for wrong in report.wrong:
            print(wrong[:1000], file=sys.stderr)
        reports.append(report)
    return reports


def main() -> int:
    reports = asyncio.run(run(parser().parse_args()))
    return 0 if all(report.is_clean for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())

"""This working tree against another revision of it: scheduler, control plane and throughput.

The revision is checked out into a temporary folder with stubs of its own. Each tree measures itself
with its own scripts (bench.scheduler_cost, bench.control_cost); for the throughput each serves with
its own `twinplane up`, and one load generator, this tree's client, loads both. They take turns
(old, new, new, old; the next round the other way round) until each ratio's standard error is below
half the tolerance and the ratio is two errors away from the bound, or for --max-rounds. The exit
status is 0 when every bound is kept, 1 when one is missed or undecided, 2 when nothing was
measured. What is installed in the environment is the same for both.

    python -m bench.against [REVISION] [--benches scheduler_cost control_cost throughput]
    python -m bench.against REVISION --quick     does it run? says nothing about speed
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.contests import Contest, ScriptContest, ThroughputContest
from bench.machine import this_machine
from bench.results import Results
from bench.trees import Tree, TreeFailed, checked_out, last_release, uncommitted, working_tree
from bench.turns import Answers, Question, Side, is_settled
from twinplane.models import DEFAULT_MODEL

BENCHES = ("scheduler_cost", "control_cost", "throughput")


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    options = parse(arguments)
    try:
        revision = options.revision or last_release()
        if revision is None:
            raise TreeFailed("there is no tag, so no last release: name a REVISION")
        with checked_out(revision) as old:
            return compare(options, {Side.OLD: old, Side.NEW: working_tree()})
    except TreeFailed as error:
        print(f"python -m bench.against: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("revision", nargs="?", metavar="REVISION", help="what git names it (default: the last tag)")
    add("--benches", nargs="+", default=list(BENCHES), choices=BENCHES)
    add("--tolerance", type=float, default=0.03, help="how much worse is kept (default: 0.03)")
    add("--max-rounds", type=int, default=16, help="four turns each (default: 16)")
    add("--running", type=int, nargs="+", help="scheduler_cost (default: 1 64 256 1024)")
    add("--rows", type=int, nargs="+", help="control_cost (default: 256)")
    add("--streams", type=int, nargs="+", help="throughput (default: 1 8 32)")
    add("--prompt-tokens", type=int, help="throughput (default: 128)")
    add("--output-tokens", type=int, help="throughput (default: 64)")
    add("--quantization", nargs="+", choices=["float32", "int8"], help="throughput (default: both)")
    add("--model", default=DEFAULT_MODEL, help="throughput: the model, as `twinplane up` takes it")
    add("--quick", action="store_true", help="two rounds of the smallest cases")
    add("--save", type=Path, metavar="FOLDER", help="also write FOLDER/against.jsonl")
    options = parser.parse_args(arguments)
    quick = options.quick
    usual: dict[str, object] = {
        "running": [1, 64] if quick else [1, 64, 256, 1024],
        "rows": [16] if quick else [256],
        "streams": [1] if quick else [1, 8, 32],
        "prompt_tokens": 16 if quick else 128,
        "output_tokens": 8 if quick else 64,
        "quantization": ["float32"] if quick else ["float32", "int8"],
    }
    for name, value in usual.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if quick:
        options.max_rounds = min(2, options.max_rounds)
    if not 0 < options.tolerance < 1 or options.max_rounds < 1:
        parser.error("--tolerance lies between 0 and 1, --max-rounds is at least 1")
    return options


def compare(options: argparse.Namespace, trees: dict[Side, Tree]) -> int:
    """Every chosen benchmark, and the exit status."""
    for tree in trees.values():
        tree.check_imports()
    old, new = trees[Side.OLD], trees[Side.NEW]
    changed = uncommitted()
    if changed:
        files = "\n".join(f"***   {line}" for line in changed[:20])
        print(
            f"*** UNCOMMITTED CHANGES ARE MEASURED, not {new.commit} alone "
            f"({len(changed)} files):\n{files}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    results = Results("against", this_machine(), options.save)
    results.note(
        f"old is {old.name}, commit {old.commit}; new is the {new.name}, commit {new.commit}"
        + (f" with {len(changed)} files changed since" if changed else "")
    )
    kept = True
    for contest in chosen(options):
        kept &= settle(results, contest, trees, options)
    results.show()
    return 0 if kept or options.quick else 1


def chosen(options: argparse.Namespace) -> list[Contest]:
    """What the options name."""
    contests: list[Contest] = []
    if "scheduler_cost" in options.benches:
        contests.append(
            ScriptContest.over(
                "scheduler_cost", "--running", options.running, "{} running",
                {"twinplane": ("time of schedule + update", "us")}, ("--inflight", "1"),
            )
        )  # fmt: skip
    if "control_cost" in options.benches:
        contests.append(
            ScriptContest.over(
                "control_cost", "--rows", options.rows, "{} rows",
                {
                    "whole step": ("time of a step", "ms"),
                    "plan": ("plan", "bytes"),
                    "result": ("result", "bytes"),
                },
            )
        )  # fmt: skip
    if "throughput" in options.benches:
        contests += [
            ThroughputContest.over(
                options.model, weights, options.streams,
                options.prompt_tokens, options.output_tokens,
            )
            for weights in options.quantization
        ]  # fmt: skip
    return contests


def settle(
    results: Results, contest: Contest, trees: dict[Side, Tree], options: argparse.Namespace
) -> bool:
    """Rounds until every question is settled. Records the answers; whether all bounds are kept."""
    old, new, tolerance = trees[Side.OLD].name, trees[Side.NEW].name, options.tolerance
    answers = {question: Answers() for question in contest.questions}
    unsettled = list(answers)
    for number in range(options.max_rounds):
        print(f"\n{contest.name}, round {number + 1} of at most {options.max_rounds}", flush=True)
        samples = contest.play(trees, number, unsettled)
        for question, taken in samples.items():
            answers[question].add(taken)
            print(line(question, answers[question], tolerance), flush=True)
        unsettled = [each for each in unsettled if not is_settled(each, answers[each], tolerance)]
        if not unsettled:
            break
    for question, answer in answers.items():
        for side, name in ((Side.OLD, old), (Side.NEW, new)):
            case = f"{question.case}, {question.quantity}"
            results.measured(case, name, question.unit, answer.samples[side])
        results.add(answer.compare(question, old, new, tolerance))
    return all(answers[each].compare(each, old, new, tolerance).holds for each in answers)


def line(question: Question, answers: Answers, tolerance: float) -> str:
    """Old, new, ratio, error and verdict so far."""
    compared = answers.compare(question, "old", "new", tolerance)
    old, new = answers.median(Side.OLD), answers.median(Side.NEW)
    return (
        f"  {question.case}, {question.quantity}: old {old:.4g}, new {new:.4g} {question.unit}, "
        f"new / old {compared.figure} {compared.bound} {compared.verdict}"
    ).rstrip()


if __name__ == "__main__":
    # What Ctrl-C cleans up, `kill` does, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

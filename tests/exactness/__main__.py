"""The whole exactness matrix: every configuration, every request. Prints what differs.

    python -m tests.exactness [--minutes 120] [--executor NAME] [--from N]

All of it on a cut of the default model, where a step takes milliseconds. Then a fifth of the
configurations on the whole model, each with a few of a quarter of the requests, other ones each
time. Last, all golden prompts one at a time through the running service. That takes 40 to 90
minutes on two cores; what finds no time is said, and is no success. A run that was cut short is
taken up by --from N, the first configuration of the cut model that it lacks.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.exactness.cases import COUNT, Case, make_cases, some_of
from tests.exactness.matrix import CANONICAL, Configuration, every_configuration
from tests.exactness.models import cut_model, default_model
from tests.exactness.serving import Outcome, Service, serving
from tests.golden.references import load_references
from tests.golden.ways import ALONE, greedy_disagreements
from tests.golden.ways import serving as serving_planes

QUARTER = COUNT // 4
FEW_CASES = 16


@dataclass(slots=True, eq=False)
class Run:
    """One model through some configurations, from the `first`, counted from 1, to the `deadline`,
    after which none begins."""

    title: str
    folder: Path
    case_count: int
    configurations: list[Configuration]
    executor: str | None
    deadline: float
    first: int = 1
    wrong: int = 0
    missed: int = 0

    def serve(self, at_once: int) -> None:
        """Serves at most `at_once` cases in each configuration, other ones each time."""
        cases, expected = self._canonical()
        numbered = list(enumerate(self.configurations, start=1))[self.first - 1 :]
        for threads, group in itertools.groupby(numbered, key=lambda pair: pair[1].threads):
            with serving(self.folder, threads, executor=self.executor) as service:
                for number, configuration in group:
                    if time.monotonic() > self.deadline:
                        self.missed += 1
                        continue
                    label = f"{number}/{len(self.configurations)} {configuration}"
                    suitable = [case for case in cases if configuration.suits(case)]
                    chosen = some_of(suitable, at_once, number)
                    self._check(service, configuration, chosen, expected, label)
        self._say(f"{self.wrong} configurations differ, {self.missed} found no time")

    def _canonical(self) -> tuple[list[Case], Outcome]:
        with serving(self.folder, CANONICAL.threads, executor=self.executor) as service:
            cases = some_of(make_cases(service.vocabulary_size), self.case_count)
            self._say(f"{service.executor}: what is right, one at a time")
            return cases, service.serve_alone(cases, self.configurations)

    def _check(
        self,
        service: Service,
        configuration: Configuration,
        cases: Sequence[Case],
        expected: Outcome,
        label: str,
    ) -> None:
        started = time.monotonic()
        outcome = service.serve(configuration, cases, configuration.token_count)
        differences = outcome.differences(expected)
        self.wrong += bool(differences)
        self._say(
            f"{label}: {len(cases)} requests, {len(outcome.logits)} rows of logits, "
            f"{outcome.preemptions} preemptions, {outcome.cached_prompt_tokens} tokens cached, "
            f"{time.monotonic() - started:.1f} s: "
            + (f"{len(differences)} DIFFERENCES" if differences else "equal")
        )
        for difference in differences[:10]:
            self._say(difference)

    def _say(self, line: str) -> None:
        print(f"{self.title}: {line}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exactness")
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--executor", default=None)
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    every = every_configuration()
    with tempfile.TemporaryDirectory() as folder:
        cut = Run(
            "cut", cut_model(Path(folder)), COUNT, every, options.executor, deadline, options.first
        )
        cut.serve(COUNT)
    whole = Run("default", default_model(), QUARTER, every[::5], options.executor, deadline)
    whole.serve(FEW_CASES)
    golden = golden_alone()
    return 1 if golden or any(run.wrong or run.missed for run in (cut, whole)) else 0


def golden_alone() -> dict[int, str]:
    """What the running service says otherwise than transformers, one request at a time."""
    with tempfile.TemporaryDirectory() as folder, serving_planes(ALONE, Path(folder)) as planes:
        differences = greedy_disagreements(planes, ALONE, load_references())
    for number, difference in differences.items():
        print(f"golden: prompt {number}: {difference}", flush=True)
    print(f"golden: {len(differences)} prompts differ from transformers", flush=True)
    return differences


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

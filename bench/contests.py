"""What bench/against.py measures two trees by: their own scripts, or their services under a load.

A round of a contest takes four turns, two of each tree (bench.turns.order).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.contestants import VOCABULARY
from bench.load import Load, random_prompts
from bench.service import load, served
from bench.trees import Tree, TreeFailed
from bench.turns import Question, Side, order

# A script that takes longer hangs.
_SCRIPT_SECONDS = 600.0
_WARM_UP_TOKENS = 16

Samples = dict[Question, dict[Side, list[float]]]


class Contest(Protocol):
    """A benchmark that both trees can be measured by."""

    @property
    def name(self) -> str: ...

    @property
    def questions(self) -> Sequence[Question]:
        """All that it can answer."""

    def play(
        self, trees: Mapping[Side, Tree], number: int, questions: Sequence[Question]
    ) -> Samples:
        """Round `number`: two samples of each side for every question asked. Raises TreeFailed."""


def nothing_yet(questions: Iterable[Question]) -> Samples:
    return {question: {side: [] for side in Side} for question in questions}


@dataclass(frozen=True, slots=True)
class Sought:
    """Where a question's answer stands in what a script prints: the program of the case, which
    `size` as the script's flag asks for."""

    size: int
    program: str


@dataclass(frozen=True, slots=True)
class ScriptContest:
    """Each tree's `python -m bench.NAME`, a process of its own every turn."""

    name: str
    flag: str
    arguments: tuple[str, ...]
    sought: Mapping[Question, Sought]

    @classmethod
    def over(
        cls,
        name: str,
        flag: str,
        sizes: Sequence[int],
        case: str,
        programs: Mapping[str, tuple[str, str]],
        arguments: Sequence[str] = (),
    ) -> ScriptContest:
        """A case for each size; of each case, for each program, its quantity and unit."""
        sought = {
            Question(case.format(size), quantity, unit): Sought(size, program)
            for size in sizes
            for program, (quantity, unit) in programs.items()
        }
        return cls(name, flag, tuple(arguments), sought)

    @property
    def questions(self) -> Sequence[Question]:
        return tuple(self.sought)

    def play(
        self, trees: Mapping[Side, Tree], number: int, questions: Sequence[Question]
    ) -> Samples:
        samples = nothing_yet(questions)
        sizes = dict.fromkeys(str(self.sought[question].size) for question in questions)
        for side in order(number):
            printed = trees[side].run(
                "-m", f"bench.{self.name}", "--rounds", "1", *self.arguments, self.flag, *sizes,
                timeout=_SCRIPT_SECONDS,
            )  # fmt: skip
            found = medians(printed)
            for question in questions:
                key = question.case, self.sought[question].program
                if key not in found:
                    who = f"bench.{self.name} of {trees[side].name}"
                    raise TreeFailed(f"{who} measured no {key[1]!r} of {key[0]!r}: {list(found)}")
                samples[question][side].append(found[key])
        return samples


def medians(printed: str) -> dict[tuple[str, str], float]:
    """(case, program) → median, of the measurements among a script's printed lines."""
    found = {}
    for line in printed.splitlines():
        if not line.startswith("{"):
            continue
        record = json.loads(line)
        if record["kind"] == "measurement":
            found[record["case"], record["program"]] = float(record["median"])
    return found


@dataclass(frozen=True, slots=True)
class ThroughputContest:
    """Both trees' `twinplane up`, new in every round; while one is loaded the other has nothing to
    do. `streams`: of each question's case."""

    name: str
    flags: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    streams: Mapping[Question, int]

    @classmethod
    def over(
        cls,
        model: str,
        weights: str,
        stream_counts: Sequence[int],
        prompt_tokens: int,
        output_tokens: int,
    ) -> ThroughputContest:
        """`weights`: "float32" or "int8". One stream also shows what a decode step takes."""
        streams = {}
        for count in stream_counts:
            case = f"{weights}, {count} streams, {prompt_tokens} + {output_tokens} tokens"
            streams[Question(case, "output rate", "output tok/s", larger_is_better=True)] = count
            if count == 1:
                streams[Question(case, "time between tokens", "ms")] = count
        flags = ["--model", model]
        flags += [] if weights == "float32" else ["--quantization", weights]
        return cls(f"throughput {weights}", tuple(flags), prompt_tokens, output_tokens, streams)

    @property
    def questions(self) -> Sequence[Question]:
        return tuple(self.streams)

    def play(
        self, trees: Mapping[Side, Tree], number: int, questions: Sequence[Question]
    ) -> Samples:
        samples = nothing_yet(questions)
        counts = dict.fromkeys(self.streams[question] for question in questions)
        turns = order(number)
        with contextlib.ExitStack() as stack:
            addresses = {
                side: stack.enter_context(served(*self.flags, tree=trees[side])).address
                for side in turns[:2]
            }
            for address in addresses.values():
                for count in (1, max(counts)):
                    prompts = random_prompts(count, _WARM_UP_TOKENS, VOCABULARY, seed=count)
                    load(address, prompts, count, 4)
            for count in counts:
                for turn, side in enumerate(turns):
                    # The first turns of both sides get the same prompts, and the second ones.
                    seed = 1000 * (2 * number + turn // 2) + count
                    prompts = random_prompts(max(2, count), self.prompt_tokens, VOCABULARY, seed)
                    taken = load(addresses[side], prompts, count, self.output_tokens)
                    for question in questions:
                        if self.streams[question] == count:
                            samples[question][side].append(answer(question, taken))
        return samples


def answer(question: Question, taken: Load) -> float:
    """In the question's unit."""
    if question.larger_is_better:
        return taken.output_tokens_per_second
    return 1e3 * taken.between_tokens_seconds

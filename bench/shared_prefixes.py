"""A trace of requests that share prefixes, for bench/placement.py: nobody's real traffic.

Applications have a system prompt each; few are popular and many are rare (Zipf). A conversation
begins with an application's prompt and a question, and each further turn brings the whole
conversation and a new question. Some requests share nothing with anybody.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from control_plane.core.request import (
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
)

ANSWER_TOKEN = 5
"""What every simulated worker says."""
_VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What a trace looks like; counts are of tokens, ranges inclusive.

    `unique_share`: of the conversations, those that begin without a system prompt.
    """

    applications: int
    zipf: float = 1.0
    system: tuple[int, int] = (200, 1200)
    question: tuple[int, int] = (20, 300)
    answer: tuple[int, int] = (8, 72)
    turns: tuple[int, int] = (1, 7)
    unique_share: float = 0.15
    pause: tuple[float, float] = (0.2, 1.0)
    """Seconds between an answer's end and the next question."""

    @property
    def mean_turns(self) -> float:
        return sum(self.turns) / 2

    @property
    def mean_demand(self) -> tuple[float, float]:
        """Tokens that a request needs computed if nothing is computed twice: prompt, answer."""
        return sum(self.question) / 2, sum(self.answer) / 2


@dataclass(slots=True, eq=False)
class Conversation:
    """Its log, and how many questions it still has."""

    log: array[int]
    turns_left: int
    rng: random.Random
    shape: Shape
    answer_count: int = 0

    def ask(self, number: int, now: float) -> Request:
        """The next question, with all that was said before."""
        rng = self.rng
        self.turns_left -= 1
        self.log.extend(
            rng.randrange(_VOCABULARY) for _ in range(rng.randint(*self.shape.question))
        )
        self.answer_count = rng.randint(*self.shape.answer)
        return Request(
            request_id=RequestId(str(number)),
            prompt_token_ids=array("I", self.log),
            sampling=SamplingParams(temperature=0.0),
            seed=number,
            stop=StopConditions(max_tokens=self.answer_count),
            arrival=now,
        )

    def answered(self) -> float:
        """The answer is there. Returns the seconds until the next question."""
        self.log.extend([ANSWER_TOKEN] * self.answer_count)
        return self.rng.uniform(*self.shape.pause)


@dataclass(slots=True, eq=False)
class Trace:
    """Conversations, one after another. Equal seeds give equal ones, whenever each is asked for."""

    shape: Shape
    seed: int
    _systems: list[array[int]] = field(init=False)
    _weights: list[float] = field(init=False)

    def __post_init__(self) -> None:
        rng, shape = random.Random(self.seed), self.shape
        self._systems = [
            array("I", (rng.randrange(_VOCABULARY) for _ in range(rng.randint(*shape.system))))
            for _ in range(shape.applications)
        ]
        self._weights = list(
            accumulate(1.0 / (place + 1) ** shape.zipf for place in range(shape.applications))
        )

    def conversations(self) -> Iterator[Conversation]:
        """Without end."""
        rng = random.Random(self.seed + 1)
        while True:
            log = array("I")
            if rng.random() >= self.shape.unique_share:
                (system,) = rng.choices(self._systems, cum_weights=self._weights)
                log.extend(system)
            turns = rng.randint(*self.shape.turns)
            yield Conversation(log, turns, random.Random(rng.random()), self.shape)


class Oracle:
    """An upper bound for hits: whatever was asked or answered anywhere before is at hand, forever.

    It counts whole blocks and leaves out a prompt's last token, as the prefix cache does. Blocks
    are told apart by all that comes before them.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[int] = set()

    def hits(self, prompt: array[int]) -> int:
        """Tokens of a prompt that are there. All of it is there from now on."""
        count = 0
        for known in self._seen_before(prompt):
            if not known:
                break
            count += self._block_size
        self.learn(prompt)
        return count

    def learn(self, log: array[int]) -> None:
        """A conversation is there up to its last answer."""
        for _ in self._seen_before(log):
            pass

    def _seen_before(self, tokens: array[int]) -> Iterator[bool]:
        """Whether each block was there; it is from now on."""
        parent, size = 0, self._block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            parent = hash((parent, tokens[start : start + size].tobytes()))
            yield parent in self._seen
            self._seen.add(parent)

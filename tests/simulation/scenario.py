"""What happens in a simulated run, as values: drawn from a seed, printed when the run fails, and
left out one by one to find the shortest run that fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from tests.simulation.fake_machine import VOCABULARY, Machine

DELAYS = (0.0, 0.001, 0.01, 0.01, 0.1, 1.0)
"""Seconds that a step may take."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A worker's process. `loss_rate`: how often its connection breaks at a message. `stages`: of
    the pipeline that it says to be."""

    rows: int
    step_tokens: int
    length: int
    blocks: int
    block_size: int
    loss_rate: float = 0.0
    arithmetic: str = ""
    stages: int = 1

    def machine(self, name: str) -> Machine:
        return Machine(
            name=name,
            max_sequence_count=self.rows,
            max_step_token_count=self.step_tokens,
            max_sequence_token_count=self.length,
            block_count=self.blocks,
            block_size=self.block_size,
            arithmetic=self.arithmetic,
            stages=self.stages,
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """A client asks. `stop_after`: its stop string is complete with this token; 0: it has none."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    stop_after: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """A client leaves."""

    number: int


@dataclass(frozen=True, slots=True)
class Break:
    """A connection breaks. Of what has arrived, so many plans are executed, and nobody is told."""

    worker: int
    executed: int


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker's process dies, and the next comes after so long."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hide:
    """A worker can't be reached for so long, and keeps what it has."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker's process stands still, and its connections look whole."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between a worker and anybody; it may execute what it has received."""

    worker: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker's steps take this much longer, for so long."""

    worker: int
    seconds: float
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Twice:
    """A worker's next result comes twice."""

    worker: int


@dataclass(frozen=True, slots=True)
class Swap:
    """A worker's next two results come in the wrong order, if two are on their way."""

    worker: int


@dataclass(frozen=True, slots=True)
class Rival:
    """Another controller claims a worker, under an epoch so much larger."""

    worker: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Jump:
    """The control plane's clock jumps ahead: its machine was asleep."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Join:
    """A worker more."""

    spec: Spec


@dataclass(frozen=True, slots=True)
class Leave:
    """A worker is to go: unless it is the last."""

    worker: int


@dataclass(frozen=True, slots=True)
class Poison:
    """From now on, a plan that computes this position of this request is invalid."""

    number: int
    position: int


@dataclass(frozen=True, slots=True)
class NewPlane:
    """The control plane dies and a new one comes. For `overlap` seconds the old one lives on."""

    overlap: float


Event = (
    Ask | Cancel | Break | Kill | Hide | Hang | Cut | Slow | Twice | Swap | Rival | Jump | Join
    | Leave | Poison | NewPlane
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    """An event, and when it happens: seconds after the start."""

    at: float
    event: Event


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole run. `patience`: seconds that requests wait for a lost worker."""

    seed: int
    specs: tuple[Spec, ...]
    events: tuple[Timed, ...]
    synchronous: bool
    caching: bool
    may_cross: bool
    patience: float
    max_waiting: int

    def with_events(self, events: list[Timed]) -> Scenario:
        return replace(self, events=tuple(events))

    def lines(self) -> list[str]:
        """For people: the settings, then an event a line."""
        told = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "events"]
        return [*told, *(f"{timed.at:8.3f} {timed.event}" for timed in self.events)]


def draw(
    seed: int, *, worker_count: int | None = None, synchronous: bool | None = None
) -> Scenario:
    """The scenario of a seed. With `worker_count`, so many workers, and none joins or leaves."""
    rng = random.Random(seed)
    is_fixed = worker_count is not None
    longest = rng.choice((24, 48, 64))
    # What a restarted control plane is asked to go on with may be as long as the longest allows.
    may_differ = rng.random() < 0.3
    arithmetic = ("one", "two") if not is_fixed and rng.random() < 0.2 else ("one",)

    def spec() -> Spec:
        return _draw_spec(rng, longest + rng.choice((0, 8, 30)) * may_differ, arithmetic)

    specs = tuple(spec() for _ in range(worker_count or rng.choice((1, 2, 2, 3, 4))))
    drawn_synchronous = rng.random() < 0.3
    asks = _draw_asks(rng, longest)
    makers = _makers(rng, asks, spec, may_restart=not may_differ and not is_fixed)
    if is_fixed:
        makers = [make for make in makers if make.__name__ not in ("join", "leave", "new_plane")]
    # Few kinds at a time: then one failure does not hide another, and each kind meets each other.
    chosen = rng.sample(makers, rng.randrange(1, min(6, len(makers)) + 1))
    events: list[Timed] = list(asks)
    at = 0.0
    for _ in range(rng.randrange(2, 26)):
        at += rng.expovariate(rng.choice((1.0, 5.0, 20.0)))
        event = rng.choice(chosen)(len(specs) + sum(isinstance(t.event, Join) for t in events))
        events.append(Timed(round(at, 4), event))
    events.sort(key=lambda timed: timed.at)
    return Scenario(
        seed=seed,
        specs=specs,
        events=tuple(events),
        synchronous=drawn_synchronous if synchronous is None else synchronous,
        caching=rng.random() < 0.8,
        may_cross=rng.random() < 0.5,
        patience=1e9 if rng.random() < 0.8 else rng.choice((3.0, 20.0)),
        max_waiting=rng.choice((1024, 1024, 3)),
    )


def _draw_spec(rng: random.Random, length: int, arithmetic: tuple[str, ...]) -> Spec:
    block_size = rng.choice((1, 3, 4, 16))
    least = -(-length // block_size) + 1
    spec = Spec(
        rows=rng.randrange(1, 6),
        step_tokens=rng.randrange(6, 40),
        length=length,
        blocks=least + rng.randrange(0, least * 2),
        block_size=block_size,
        loss_rate=rng.choice((0.0, 0.0, 0.01, 0.05)),
        arithmetic=rng.choice(arithmetic),
    )
    # Not drawn, so that what is drawn behind it stays what it was.
    return replace(spec, stages=(1, 2, 1, 3)[(spec.step_tokens + spec.blocks) % 4])


def _draw_asks(rng: random.Random, longest: int) -> list[Timed]:
    """Requests come in bursts. Prompts share prefixes often, so that the prefix cache has work."""
    asks = []
    at = 0.0
    for number in range(rng.randrange(1, 25)):
        at += rng.choice((0.0, 0.0, 0.0, 0.01, 0.5))
        shared = tuple(range(2, 2 + rng.randrange(0, 20)))
        own = tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 12)))
        ask = Ask(
            number=number,
            prompt=(shared + own)[: longest - 1],
            max_tokens=rng.randrange(1, 40),
            seed=1000 * (number + 1) + rng.randrange(1000),  # names the request in plans
            stop_ids=(rng.randrange(2, VOCABULARY),) if rng.random() < 0.3 else (),
            priority=rng.randrange(-3, 4),
            stop_after=rng.randrange(1, 30) if rng.random() < 0.2 else 0,
        )
        asks.append(Timed(round(at, 4), ask))
    return asks


def _makers(
    rng: random.Random, asks: list[Timed], spec: Callable[[], Spec], *, may_restart: bool
) -> list[Callable[[int], Event]]:
    """What can happen, each made for so many workers."""

    def any_ask() -> Ask:
        event = rng.choice(asks).event
        assert isinstance(event, Ask)
        return event

    def seconds() -> float:
        return round(rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.0, 6.0))), 3)

    def cancel(_: int) -> Event:
        return Cancel(any_ask().number)

    def break_(count: int) -> Event:
        return Break(rng.randrange(count), rng.randrange(3))

    def kill(count: int) -> Event:
        return Kill(rng.randrange(count), seconds())

    def hide(count: int) -> Event:
        return Hide(rng.randrange(count), seconds())

    def hang(count: int) -> Event:
        return Hang(rng.randrange(count), rng.choice((seconds(), rng.uniform(5.0, 20.0))))

    def cut(count: int) -> Event:
        return Cut(rng.randrange(count), rng.choice((seconds(), rng.uniform(5.0, 20.0))))

    def slow(count: int) -> Event:
        return Slow(rng.randrange(count), seconds(), rng.choice((0.05, 0.5, 2.0)))

    def twice(count: int) -> Event:
        return Twice(rng.randrange(count))

    def swap(count: int) -> Event:
        return Swap(rng.randrange(count))

    def rival(count: int) -> Event:
        return Rival(rng.randrange(count), rng.randrange(1, 4))

    def jump(_: int) -> Event:
        return Jump(rng.choice((0.5, 5.0, 100.0)))

    def join(_: int) -> Event:
        return Join(spec())

    def leave(count: int) -> Event:
        return Leave(rng.randrange(count))

    def poison(_: int) -> Event:
        ask = any_ask()
        return Poison(ask.number, rng.randrange(len(ask.prompt) + ask.max_tokens))

    def new_plane(_: int) -> Event:
        return NewPlane(rng.choice((0.0, 0.0, 0.3, 3.0)))

    makers = [cancel, break_, kill, hide, hang, cut, slow, twice, swap, rival, jump, join, leave]
    return [*makers, poison, *([new_plane] if may_restart else [])]

"""Kills the control plane, or tells it to stop, again and again, under clients that resume.

Every generation is compared afterwards with the same request and seed on planes that nobody kills:
text, tokens, end and usage have to be equal, and what the iterator gave has to be the result.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.support.planes import Plane, free_port
from twinplane import AsyncClient, GenerationResult, Message, RetryPolicy, TwinplaneError
from twinplane.client.options import GenerateOptions

CALM_SECONDS = (0.0, 3.0)
"""How long a control plane serves before it is killed."""
DEADLINE_SECONDS = 180.0
"""Of one generation: far more than any takes."""


@dataclass(frozen=True)
class Ask:
    """A request: `prompt` is a text, tokens or one user's words. It is streamed, or answered at
    once.
    """

    prompt: str | list[int] | list[Message]
    options: GenerateOptions
    streams: bool


@dataclass
class Seen:
    """One generation as its caller saw it; `pauses` are between its deltas, in seconds."""

    ask: Ask
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    result: GenerationResult | None = None
    error: TwinplaneError | None = None
    pauses: list[float] = field(default_factory=list)

    def differs_from(self, calm: GenerationResult) -> str | None:
        """What is lost, doubled or changed; None: nothing."""
        result = self.result
        assert result is not None
        for name in ("text", "token_ids", "finish_reason", "stop_string", "stop_token_id"):
            if getattr(result, name) != getattr(calm, name):
                return f"another {name}"
        for name in ("prompt_token_count", "completion_token_count"):
            if getattr(result.usage, name) != getattr(calm.usage, name):
                return f"another {name}"
        if (self.text, tuple(self.token_ids)) != (result.text, result.token_ids):
            return "the deltas are not the result"
        return None


@dataclass
class Report:
    """What came of a run.

    `recoveries`: seconds from a kill until the next control plane serves. `claims`: seconds from
    when one listened until it had its worker, in ascending order. `brought`: of each request that
    was resumed and ended well, the tokens that it came with.
    """

    seen: list[Seen]
    differences: list[str]
    recoveries: list[float]
    claims: list[float]
    brought: list[int]


def make_ask(draw: random.Random, vocabulary_size: int) -> Ask:
    """A request of any kind."""
    text = "".join(draw.choice("abc ÄÖ€🙂") for _ in range(draw.randint(1, 20)))
    prompt = draw.choice(
        [
            text,
            [draw.randrange(vocabulary_size) for _ in range(draw.randint(1, 40))],
            [Message("user", text)],
        ]
    )
    options: GenerateOptions = {
        "max_tokens": draw.randint(1, 200), "ignore_eos": draw.random() < 0.7,
    }  # fmt: skip
    if draw.random() < 0.3:
        options["temperature"] = draw.choice([0.0, 0.7])
    if draw.random() < 0.3:
        options["top_k"] = draw.randint(1, 50)
    if draw.random() < 0.4:
        options["stop"] = ["".join(draw.choice("abcdefghij") for _ in range(2)) for _ in range(16)]
    if draw.random() < 0.2:
        options["stop_token_ids"] = [draw.randrange(vocabulary_size)]
    if draw.random() < 0.5:
        options["seed"] = draw.getrandbits(64)
    return Ask(prompt, options, draw.random() < 0.9)


class Killed:
    """A worker that stays, and a control plane that does not."""

    def __init__(
        self, folder: Path, sockets: Path, model: str, worker_flags: Sequence[str]
    ) -> None:
        self._folder = folder
        self._uds = sockets / "worker.sock"
        self._model = model
        self._logs: list[Path] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.worker = Plane(
            ["worker", "--model", model, "--uds", str(self._uds), *worker_flags],
            folder / "worker.log",
        )
        self.control = self._start()

    def _start(self) -> Plane:
        self._logs.append(self._folder / f"control-{len(self._logs)}.log")
        port = self.address.rpartition(":")[2]
        return Plane(
            ["control", "--model", self._model, "--worker", f"unix:{self._uds}",
             "--port", port, "--metrics-port", "none", "--drain-grace-seconds", "0.3",
             "--log-format", "json"],
            self._logs[-1],
        )  # fmt: skip

    def wait_until_serving(self) -> None:
        self.control.wait_until_serving(self.address)

    def kill(self, how: signal.Signals) -> float:
        """Ends it. Returns after how many seconds the next one serves."""
        began = time.monotonic()
        code = self.control.stop(how)
        assert code == (0 if how is signal.SIGTERM else -how), self.control.log_end()
        self.control = self._start()
        self.wait_until_serving()
        return time.monotonic() - began

    def brought(self) -> list[int]:
        """The tokens of each request that was resumed and ended well."""
        return [
            int(line["resumed_tokens"])
            for log in self._logs
            for line in _lines(log)
            if line["message"] == "request finished"
            and line["code"] == "OK"
            and line.get("resumed_tokens")
        ]

    def claim_seconds(self) -> list[float]:
        """How long each life had to wait for its worker once it listened, in ascending order.

        But for the first, which was there before the worker.
        """
        found = []
        for log in self._logs[1:]:
            lines = {line["message"]: line for line in _lines(log)}
            if "worker attached" in lines:
                listening, attached = (
                    datetime.fromisoformat(lines[message]["time"])
                    for message in ("listening", "worker attached")
                )
                found.append((attached - listening).total_seconds())
        return sorted(found)

    def stop(self) -> None:
        self.control.stop()
        self.worker.stop()


def _lines(log: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log. A process that was killed may have left half of its last one."""
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            yield json.loads(line)


@contextmanager
def planes(folder: Path, model: str, worker_flags: Sequence[str]) -> Iterator[Killed]:
    sockets = Path(tempfile.mkdtemp(prefix="twinplane-"))  # a socket's path must be short
    made = Killed(folder, sockets, model, worker_flags)
    try:
        made.wait_until_serving()
        yield made
    finally:
        made.stop()
        shutil.rmtree(sockets, ignore_errors=True)


async def see(client: AsyncClient, ask: Ask) -> Seen:
    """Reads one generation to its end, or to its error."""
    seen = Seen(ask)
    last = time.monotonic()
    try:
        if not ask.streams:
            seen.result = await client.complete(ask.prompt, timeout=DEADLINE_SECONDS, **ask.options)
            seen.text, seen.token_ids = seen.result.text, list(seen.result.token_ids)
            return seen
        generation = client.generate(ask.prompt, timeout=DEADLINE_SECONDS, **ask.options)
        async for delta in generation:
            now = time.monotonic()
            seen.pauses.append(now - last)
            last = now
            seen.text += delta.text
            seen.token_ids += delta.token_ids
        seen.result = await generation.result()
    except TwinplaneError as error:
        seen.error = error
    return seen


async def run(
    made: Killed, *, kills: int, clients: int, seed: int, vocabulary_size: int = 256
) -> Report:
    """Kills the control plane so many times while so many clients ask; then compares."""
    over = asyncio.Event()
    seen: list[Seen] = []
    recoveries: list[float] = []
    # A call that is made while nobody serves was never taken up: it is tried for as long.
    retry = RetryPolicy(max_attempts=1000, max_backoff=1.0)

    async def ask_on(number: int) -> None:
        draw = random.Random(f"{seed}/{number}")
        async with AsyncClient(made.address, retry=retry) as client:
            while not over.is_set():
                seen.append(await see(client, make_ask(draw, vocabulary_size)))

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(ask_on(number))
        draw = random.Random(f"{seed}/kills")
        try:
            for _ in range(kills):
                await asyncio.sleep(draw.uniform(*CALM_SECONDS))
                how = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
                recoveries.append(await asyncio.to_thread(made.kill, how))
        finally:
            over.set()
    differences = await _differences(made, seen)
    return Report(seen, differences, recoveries, made.claim_seconds(), made.brought())


async def _differences(made: Killed, seen: list[Seen]) -> list[str]:
    """What is other than on planes that nobody kills."""
    found = []
    places = asyncio.Semaphore(16)
    async with AsyncClient(made.address) as client:

        async def compare(one: Seen) -> None:
            if one.result is None:
                found.append(f"{type(one.error).__name__}: {one.error}: {one.ask}")
                return
            options: GenerateOptions = {**one.ask.options, "seed": one.result.seed}
            async with places:
                calm = await client.generate(one.ask.prompt, **options).result()
            if (difference := one.differs_from(calm)) is not None:
                found.append(f"{difference}: {one.ask}")

        await asyncio.gather(*(compare(one) for one in seen))
    return found

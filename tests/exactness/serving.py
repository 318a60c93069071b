"""Serves cases in process, in one configuration at a time, and keeps the bits of every logits row.

The real driver, contract messages, facade and model runner; the only thing put in between stands in
front of the sampler and reads what passes. A draw's seed and position say whose it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import torch

from bench.inprocess import InProcessWorker
from control_plane.core.events import FinishReason
from control_plane.core.request import Request, RequestId, StopConditions
from control_plane.observability.metrics import Telemetry
from control_plane.shell.driver import Driver, DriverSettings
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import MemoryPool, WorkerInfo
from control_plane.shell.stream import TokenStream
from tests.exactness.cases import BLOCK_SIZE, Case
from tests.exactness.matrix import CANONICAL, WHOLE, Configuration
from tests.support import runner_rig
from worker_service.facade import WorkerFacade
from worker_service.runner import model_runner
from worker_service.runner.load import load_runner
from worker_service.runner.options import RunnerOptions
from worker_service.sampling.sampler import MaskBatch, Sampled, SamplingBatch

_KV_BYTES = 768 << 20
_PATIENCE_SECONDS = 300.0

Place = tuple[int, int]
"""A seed and the position of the token drawn with it."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What came of some cases: `tokens` by case number, `logits` digests by place.

    `torn`: places whose logits were computed twice, and differed.
    """

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logits: dict[Place, bytes] = field(default_factory=dict)
    torn: list[Place] = field(default_factory=list)
    preemptions: int = 0
    cached_prompt_tokens: int = 0

    def record(
        self, logits: torch.Tensor, batch: SamplingBatch, masks: MaskBatch | None
    ) -> Sampled:
        """Stands in for the sampler: digests logits [S, vocabulary], then samples them."""
        rows = logits.detach().float().contiguous().numpy()
        seeds, positions = batch.seeds.tolist(), batch.positions.tolist()
        for seed, position, row in zip(seeds, positions, rows, strict=True):
            digest = hashlib.blake2b(row, digest_size=16).digest()
            if self.logits.setdefault((seed, position), digest) != digest:
                self.torn.append((seed, position))
        return _sample(logits, batch, masks)

    def differences(self, expected: Outcome) -> list[str]:
        """Where this is not what was expected, at the places that both know."""
        found = [f"case {seed - 1}, position {at}: torn logits" for seed, at in self.torn]
        for number, tokens in self.tokens.items():
            right = expected.tokens[number][: len(tokens)]
            if tokens != right:
                found.append(f"case {number}: tokens {tokens}, not {right}")
        for place, digest in self.logits.items():
            if expected.logits.get(place, digest) != digest:
                found.append(f"case {place[0] - 1}, position {place[1]}: other logits")
        return found


_sample = model_runner.sample


class Service:
    """One loaded worker; `serve` puts a new control plane before it each time."""

    def __init__(self, loop: asyncio.Runner, facade: WorkerFacade) -> None:
        self._loop = loop
        self._facade = facade

    @property
    def vocabulary_size(self) -> int:
        return self._facade.worker_info().capability.model.vocabulary_size

    @property
    def executor(self) -> str:
        return self._facade.worker_info().capability.executor

    def serve_alone(self, cases: Sequence[Case], ways: Sequence[Configuration]) -> Outcome:
        """What is right: canonically, and as many tokens of each as any of the ways asks for."""
        outcome = Outcome()
        for case in cases:
            count = max(way.token_count for way in ways if way.suits(case))
            alone = self.serve(CANONICAL, [case], count)
            outcome.tokens |= alone.tokens
            outcome.logits |= alone.logits
        return outcome

    def serve(
        self, configuration: Configuration, cases: Sequence[Case], token_count: int
    ) -> Outcome:
        """Generates `token_count` tokens for each case.

        With a cache everything is served twice. The second time each case continues from its own
        middle, so that it also hits blocks that were written token by token.
        """
        outcome = Outcome()
        with mock.patch.object(model_runner, "sample", outcome.record):
            self._loop.run(self._serve(configuration, list(cases), token_count, outcome))
        return outcome

    async def _serve(
        self, configuration: Configuration, cases: list[Case], token_count: int, outcome: Outcome
    ) -> None:
        if configuration.shuffled:
            random.Random(token_count).shuffle(cases)
        ready = asyncio.Event()
        driver = Driver(
            _Worker(self._facade, configuration.block_count),
            _settings(configuration),
            clock=time.monotonic,
            rng=random.Random(0),
            telemetry=Telemetry("test"),
            on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(driver.run())
            await ready.wait()
            known: dict[int, tuple[int, ...]] = {case.number: () for case in cases}
            await _generate(driver, cases, known, token_count)
            if configuration.cached:
                outcome.tokens = dict(known)
                known = {number: tokens[: token_count // 2] for number, tokens in known.items()}
                await _generate(driver, cases, known, token_count)
                assert known == outcome.tokens, "served again, other tokens came"
            outcome.tokens = known
            stats = driver.stats()
            assert stats is not None
            outcome.preemptions = stats.preemptions
            outcome.cached_prompt_tokens = stats.cached_prompt_tokens
            running.cancel()


@contextmanager
def serving(folder: Path, threads: int, **changes: object) -> Iterator[Service]:
    """Loads a model folder on that many threads; `changes` are RunnerOptions."""
    options = runner_rig.options(
        folder,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=_KV_BYTES,
        max_sequence_count=32,
        max_step_token_count=WHOLE,
        max_sequence_token_count=WHOLE,
        thread_count=threads,
        **changes,
    )
    with asyncio.Runner() as loop:
        facade = loop.run(_load(options))
        try:
            yield Service(loop, facade)
        finally:
            loop.run(facade.close())


async def _load(options: RunnerOptions) -> WorkerFacade:
    facade = WorkerFacade(lambda: load_runner(options), worker_id="exactness", incarnation_id="1")
    await facade.load()
    return facade


class _Worker(InProcessWorker):
    """Tells the controller of `block_count` blocks where that is not None."""

    def __init__(self, facade: WorkerFacade, block_count: int | None) -> None:
        super().__init__(facade)
        self._block_count = block_count

    async def attach(self, epoch: int | None = None) -> tuple[WorkerInfo, MemoryPool]:
        info, pool = await super().attach(epoch)
        if self._block_count is not None:
            pool = replace(pool, block_count=self._block_count)
        return info, pool


async def _generate(
    driver: Driver, cases: list[Case], known: dict[int, tuple[int, ...]], token_count: int
) -> None:
    """Submits all at once, in order, and completes `known` to `token_count` tokens each."""
    async with asyncio.TaskGroup() as group:
        for index, case in enumerate(cases):
            stream, before = TokenStream(), known[case.number]
            request = Request(
                request_id=RequestId(str(case.number)),
                prompt_token_ids=case.prompt + before,
                sampling=case.sampling,
                seed=case.seed,
                stop=StopConditions(max_tokens=token_count - len(before)),
                arrival=float(index),
            )
            driver.submit(request, stream)
            group.create_task(_complete(stream, case.number, known))


async def _complete(stream: TokenStream, number: int, known: dict[int, tuple[int, ...]]) -> None:
    finish = None
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while finish is None:
            tokens, finish = await stream.take()
            known[number] += tuple(tokens)
    assert finish.reason is FinishReason.LENGTH, finish


def _settings(configuration: Configuration) -> DriverSettings:
    return DriverSettings(
        scheduling=SchedulingSettings(
            max_sequence_count=configuration.streams,
            max_step_token_count=configuration.chunk,
            async_scheduling=configuration.asynchronous,
            enable_prefix_caching=configuration.cached,
        ),
        check_invariants=True,
    )

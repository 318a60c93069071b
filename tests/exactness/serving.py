"""Serves cases in process, in one configuration at a time, and keeps the bits of every logits row.

The real fleet, contract messages, facade and model runner, which shows its logits to an observer. A
sequence's seed and a token's position say whose they are.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.inprocess import InProcessWorker
from control_plane.core.events import FinishReason
from control_plane.core.request import Request, RequestId, StopConditions
from control_plane.observability.metrics import Telemetry
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import Admit, Attachment
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from tests.exactness.cases import BLOCK_SIZE, Case
from tests.exactness.matrix import CANONICAL, WHOLE, Configuration
from tests.support import runner_rig
from worker_service.domain.capability import Capability
from worker_service.domain.capability import MemoryPool as WorkerMemoryPool
from worker_service.domain.plan import SamplePlan, StepPlan
from worker_service.facade import WorkerFacade
from worker_service.runner.interface import PendingStep, Runner
from worker_service.runner.load import load_runner
from worker_service.runner.logit_batch import LogitBatch
from worker_service.runner.options import RunnerOptions

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

    def record(self, places: Iterable[Place], logits: torch.Tensor) -> None:
        """Digests logits [L, vocabulary] of L places."""
        rows = logits.detach().float().contiguous().numpy()
        for place, row in zip(places, rows, strict=True):
            digest = hashlib.blake2b(row, digest_size=16).digest()
            if self.logits.setdefault(place, digest) != digest:
                self.torn.append(place)

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


class _Watch:
    """Sees every plan and the logits that follow from it, on the device thread."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._seeds: dict[int, int] = {}

    def build(self, options: RunnerOptions) -> Runner:
        runner = load_runner(options)
        runner.observe(self._observe)
        return _WatchedRunner(runner, self._seeds)

    def _observe(self, step_id: int, interest: LogitBatch, logits: torch.Tensor) -> None:
        pairs = zip(interest.rows.tolist(), interest.positions.tolist(), strict=True)
        self.outcome.record([(self._seeds[row], position) for row, position in pairs], logits)


@dataclass(frozen=True, slots=True, eq=False)
class _WatchedRunner:
    """interface.Runner, which notes each row's seed."""

    runner: Runner
    seeds: dict[int, int]

    def capability(self) -> Capability:
        return self.runner.capability()

    def memory_pool(self) -> WorkerMemoryPool:
        return self.runner.memory_pool()

    def reset(self) -> None:
        self.runner.reset()

    def launch(self, plan: StepPlan) -> PendingStep:
        self.seeds.update((sequence.row, sequence.sampling.seed) for sequence in plan.added)
        return self.runner.launch(plan)

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        return self.runner.launch_sample(plan)


class Service:
    """One loaded worker; `serve` puts a new control plane before it each time."""

    def __init__(self, loop: asyncio.Runner, facade: WorkerFacade, watch: _Watch) -> None:
        self._loop = loop
        self._facade = facade
        self._watch = watch

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
        outcome = self._watch.outcome = Outcome()
        self._loop.run(self._serve(configuration, list(cases), token_count, outcome))
        return outcome

    async def _serve(
        self, configuration: Configuration, cases: list[Case], token_count: int, outcome: Outcome
    ) -> None:
        if configuration.shuffled:
            random.Random(token_count).shuffle(cases)
        ready = asyncio.Event()
        fleet = Fleet(
            [_Worker(self._facade, configuration.block_count)],
            _settings(configuration),
            clock=time.monotonic,
            jitter=random.Random(0).random,
            metrics=Telemetry("test"),
            on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(fleet.run())
            await ready.wait()
            known: dict[int, tuple[int, ...]] = {case.number: () for case in cases}
            await _generate(fleet, cases, known, token_count)
            if configuration.cached:
                outcome.tokens = dict(known)
                known = {number: tokens[: token_count // 2] for number, tokens in known.items()}
                await _generate(fleet, cases, known, token_count)
                assert known == outcome.tokens, "served again, other tokens came"
            outcome.tokens = known
            stats = fleet.replicas[0].stats()
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
        watch = _Watch()
        facade = loop.run(_load(options, watch))
        try:
            yield Service(loop, facade, watch)
        finally:
            loop.run(facade.close())


async def _load(options: RunnerOptions, watch: _Watch) -> WorkerFacade:
    facade = WorkerFacade(lambda: watch.build(options), worker_id="exactness", incarnation_id="1")
    await facade.load()
    return facade


class _Worker(InProcessWorker):
    """Tells the controller of `block_count` blocks where that is not None."""

    def __init__(self, facade: WorkerFacade, block_count: int | None) -> None:
        super().__init__(facade)
        self._block_count = block_count

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        attachment = await super().attach(epoch, admit)
        if self._block_count is None:
            return attachment
        pool = replace(attachment.pool, block_count=self._block_count)
        return replace(attachment, pool=pool)


async def _generate(
    fleet: Fleet, cases: list[Case], known: dict[int, tuple[int, ...]], token_count: int
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
            fleet.submit(request, stream)
            group.create_task(_complete(stream, case.number, known))


async def _complete(stream: TokenStream, number: int, known: dict[int, tuple[int, ...]]) -> None:
    finish = None
    async with asyncio.timeout(_PATIENCE_SECONDS):
        while finish is None:
            delta = await stream.take()
            known[number] += tuple(delta.tokens.ids)
            finish = delta.finish
    assert finish.reason is FinishReason.LENGTH, finish


def _settings(configuration: Configuration) -> ReplicaSettings:
    return ReplicaSettings(
        scheduling=SchedulingSettings(
            max_sequence_count=configuration.streams,
            max_step_token_count=configuration.chunk,
            async_scheduling=configuration.asynchronous,
            enable_prefix_caching=configuration.cached,
        ),
        check_invariants=True,
    )

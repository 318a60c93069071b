"""A scheduler with a checking worker behind it, and a model of what every client must get.

Tokens are a function of seed and token log, so what a request gets alone, with no batch, no blocks
and no steps, is what it must get in any company.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import Request, SequenceId
from control_plane.core.scheduler import Scheduler
from tests.support.checking_worker import WEIGHTS, CheckingWorker, next_token


def alone(request: Request, longest: int) -> tuple[list[int], FinishReason]:
    """The naive model: one request, no batch, no blocks, no steps."""
    tokens = list(request.prompt_token_ids)
    output: list[int] = []
    while True:
        token = next_token(request.seed, tokens)
        tokens.append(token)
        output.append(token)
        if token in request.stop.stop_token_ids | request.stop.end_of_sequence_ids:
            return output, FinishReason.STOP
        if len(output) == request.stop.max_tokens or len(tokens) == longest:
            return output, FinishReason.LENGTH


@dataclass
class Harness:
    """A scheduler, its worker, what lies between them, and what every client has got so far."""

    config: SchedulerConfig
    now: float = 0.0
    epoch: int = 1
    requests: dict[SequenceId, Request] = field(default_factory=dict)
    outputs: dict[SequenceId, list[int]] = field(default_factory=dict)
    reasons: dict[SequenceId, FinishReason] = field(default_factory=dict)
    interrupted: set[SequenceId] = field(default_factory=set)
    salts: dict[int, str] = field(default_factory=dict)
    results: deque[StepResult] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.epoch, WEIGHTS)
        self.worker = CheckingWorker(self.config, self.epoch, self.salts)
        self.cached = self.config.enable_prefix_caching

    @property
    def live(self) -> list[SequenceId]:
        return [name for name in self.requests if name not in self.reasons]

    def submit(self, request: Request) -> None:
        longest = self.config.max_sequence_token_count - 1
        waiting = self.scheduler.stats().waiting
        name = SequenceId(request.seed)
        self.salts[request.seed] = request.cache_salt
        if len(request.prompt_token_ids) > longest:
            with pytest.raises(RequestTooLong, match=str(longest)):
                self.scheduler.add(name, request)
        elif waiting >= self.config.max_waiting_count:
            with pytest.raises(QueueFull) as refused:
                self.scheduler.add(name, request)
            assert refused.value.retry_after > 0
        else:
            self.scheduler.add(name, request)
            self.requests[name] = request
            self.outputs[name] = []
            with pytest.raises(AssertionError):
                self.scheduler.add(name, request)

    def schedule(self, faulty: int | None = None) -> StepPlan | None:
        ledger = self.scheduler.ledger
        full = len(ledger.inflight) >= self.config.max_inflight_step_count
        first = ledger.running.first if ledger.running else None
        fresh = first is not None and first.computed < first.token_limit - 1
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            assert full or ledger.inflight or not ledger.sequences, "work, but no plan"
            return None
        assert not full
        if first is not None and fresh:
            assert first.row in plan.scheduled.rows, "the first of all did not go on"
        assert plan.scheduled.rows or plan.removed_rows
        self.results.append(self.worker.execute(plan, faulty))
        return plan

    def deliver(self) -> None:
        for output in self.scheduler.update(self.results.popleft()):
            self.take(output)

    def take(self, output: SequenceOutput) -> None:
        name = output.sequence_id
        assert name not in self.reasons, "tokens for a request that was over"
        assert output.tokens.ids or output.finish
        self.outputs[name] += output.tokens.ids
        request = self.requests[name]
        expected, reason = alone(request, self.config.max_sequence_token_count)
        got = self.outputs[name]
        if output.finish is None:
            assert got == expected[: len(got)] and len(got) < len(expected)
            return
        finish = output.finish
        self.reasons[name] = finish.reason
        assert finish.usage.prompt_tokens == len(request.prompt_token_ids)
        assert finish.usage.completion_tokens == len(got)
        assert 0 <= finish.usage.cached_prompt_tokens < len(request.prompt_token_ids)
        if not self.cached:
            assert finish.usage.cached_prompt_tokens == 0
        if finish.reason is FinishReason.FAULT:
            assert "INVALID_LOGITS" in finish.detail
            self.interrupted.add(name)
        else:
            assert (got, finish.reason) == (expected, reason)
            own = request.stop.stop_token_ids
            assert finish.stop_token_id == (got[-1] if got[-1] in own else None)

    def finish(self, name: SequenceId, reason: FinishReason) -> None:
        finish = self.scheduler.finish(name, reason)
        assert finish is not None and finish.reason is reason
        assert finish.usage.completion_tokens == len(self.outputs[name])
        self.reasons[name] = reason
        self.interrupted.add(name)
        assert self.scheduler.finish(name, reason) is None

    def resync(self, caching: bool, block_size: int) -> None:
        """Another worker, of as many KV tokens or a few more."""
        self.epoch += 1
        tokens = self.config.usable_block_count * self.config.block_size
        self.config = replace(
            self.config,
            enable_prefix_caching=caching,
            block_size=block_size,
            block_count=1 + -(-tokens // block_size),
        )
        self.cached |= caching
        self.worker = CheckingWorker(self.config, self.epoch, self.salts)
        self.results.clear()
        assert self.scheduler.resync(self.config, self.epoch, WEIGHTS) == []

    def drain(self) -> None:
        """To the end in bounded steps, with as many plans in flight as may be."""
        lengths = [len(self.requests[name].prompt_token_ids) for name in self.live]
        bound = 20 + 40 * (sum(lengths) + self.config.max_sequence_token_count * len(lengths))
        while self.scheduler.has_work:
            assert (bound := bound - 1) > 0, "requests do not end"
            while self.schedule() is not None:
                invariants.check(self.scheduler)
            self.deliver()
            invariants.check(self.scheduler)
        assert not self.live, "no work left, but a request is not over"
        assert not self.worker.rows, "an idle worker keeps rows"
        stats = self.scheduler.stats()
        assert stats.generated_tokens == sum(map(len, self.outputs.values()))
        assert stats.submitted == len(self.requests) == sum(stats.finished.values())
        assert self.scheduler.schedule(self.now) is None
        if not self.interrupted:
            prompts = sum(len(request.prompt_token_ids) for request in self.requests.values())
            assert stats.prompt_tokens + stats.cached_prompt_tokens == prompts

"""How a rank of a replica ends its steps: one samples and tells the others, those follow.

A rank that follows launches a step without waiting for its tokens. It waits when a plan touches a
row whose token is still on the way, so a stage may begin steps of other rows meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid, Precondition
from worker_service.domain.plan import StepPlan, StepResult
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel.digest import digest_of
from worker_service.parallel.group import PendingTokens
from worker_service.parallel.peers import Peers
from worker_service.runner.interface import CompletedStep, PendingStep
from worker_service.runner.request_state import RequestState

T = TypeVar("T")

_NO_TOKEN = -1


class RankSteps:
    """Belongs to the device's thread, but for `abandon`. `state` is the runner's."""

    def __init__(self, peers: Peers, state: RequestState) -> None:
        self._peers = peers
        self._state = state
        self._following: deque[FollowedStep] = deque()

    @property
    def answers(self) -> bool:
        """Whether this rank samples."""
        return self._peers.coordinates.answers

    def join(self, rendezvous: Rendezvous) -> None:
        """See interface.Ranked."""
        self._peers.join(rendezvous)

    def abandon(self, before_epoch: int) -> None:
        """See interface.Ranked. Any thread."""
        self._peers.abandon(before_epoch)

    def reset(self) -> None:
        """The runner's rows are cleared, and the group's time is over: tokens that still come are
        nobody's."""
        for step in self._following:
            step.forget()
        self._following.clear()
        self._peers.leave()

    def guard(self, launch: Callable[[], T]) -> T:
        """Launches in the epoch's group. Where that fails, the other ranks are not left waiting.

        A refusal leaves the group as it is: every rank refuses the same plan.
        """
        self._peers.require()
        try:
            return launch()
        except (Precondition, PlanInvalid):
            raise
        except BaseException:
            self._peers.leave()
            raise

    def settle(self, *columns: IntColumn) -> None:
        """Waits for the tokens of these rows, and so of every step before theirs."""
        if self._following:
            touched = np.concatenate(columns)
            while any(np.isin(step.rows, touched).any() for step in self._following):
                self._following.popleft().settle()

    def answer(self, result: StepResult, applied: Applied, rows: IntColumn) -> StepResult:
        """Gives the tokens of the sampled `rows` to the other ranks. Returns the whole result."""
        tokens = np.full(rows.size, _NO_TOKEN, dtype=np.int32)
        tokens[np.isin(rows, result.rows)] = result.tokens
        if rows.size:
            self._peers.publish(tokens)
        return replace(result, digest=applied.digest(tokens))

    def follow(self, applied: Applied, rows: IntColumn) -> PendingStep:
        """Expects a token for each of `rows`, from the rank that samples."""
        if not rows.size:
            return CompletedStep(applied.result(rows))
        step = FollowedStep(applied, rows, self._peers.expect(rows.size), self._state)
        self._following.append(step)
        return step


class Applied:
    """What a rank applied: the scheduled rows int32 [R] with their token counts int32 [R], and the
    positions int32 [T]; of a Sample the sampled rows and the positions of their new tokens."""

    def __init__(
        self,
        epoch: int,
        step_id: int,
        rows: IntColumn,
        token_counts: IntColumn,
        positions: IntColumn,
    ) -> None:
        self.epoch = epoch
        self.step_id = step_id
        self._columns = (rows, token_counts, positions)

    @classmethod
    def nothing(cls, plan: StepPlan) -> Applied:
        """Of a plan that schedules no row."""
        none = plan.scheduled.rows
        return cls(plan.epoch, plan.step_id, none, none, none)

    def digest(self, tokens: IntColumn) -> bytes:
        """See digest_of; `tokens` int32, below 0 where a row failed."""
        return digest_of(self.epoch, self.step_id, *self._columns, tokens)

    def result(self, tokens: IntColumn) -> StepResult:
        """What a rank that follows answers."""
        return StepResult(self.epoch, self.step_id, digest=self.digest(tokens))


class FollowedStep:
    """A PendingStep whose tokens another rank samples."""

    def __init__(
        self, applied: Applied, rows: IntColumn, arriving: PendingTokens, state: RequestState
    ) -> None:
        self.rows = rows
        self._applied = applied
        self._arriving = arriving
        self._state: RequestState | None = state

    def is_ready(self) -> bool:
        """See PendingStep."""
        return self._arriving.is_ready()

    def result(self) -> StepResult:
        """See PendingStep. Raises GroupLost."""
        return self._applied.result(self.settle())

    def settle(self) -> IntColumn:
        """The tokens, once they have come. The rows have them from the first call on."""
        tokens = self._arriving.take()
        state, self._state = self._state, None
        if state is not None:
            failed = tokens == _NO_TOKEN
            state.record_sampled(self.rows[~failed], tokens[~failed], self._applied.step_id)
            state.record_faults(self.rows[failed], self._applied.step_id)
        return tokens

    def forget(self) -> None:
        """The rows are others' now."""
        self._state = None

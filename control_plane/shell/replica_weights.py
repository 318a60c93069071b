"""The weights of one replica: prepared beside its steps, exchanged between two of them, and how it
stands with that. A rollout compares this with what it wants, and asks for the difference.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from control_plane.core.plan import WeightVersion
from control_plane.core.weights import InFlightPolicy, Placement, PreparedWeights, WeightsUpdate
from control_plane.shell.interlude import Interlude
from control_plane.shell.pipeline import Pipeline
from control_plane.shell.ports import (
    Clock,
    PreparedUpdate,
    RefusalReason,
    ReplicaMetrics,
    WeightsWorker,
    Worker,
    WorkerLost,
    WorkerRefused,
)
from control_plane.shell.served_weights import ServedWeights
from control_plane.shell.serving import Serving
from twinplane.process.logs import fields

T = TypeVar("T")

_BESIDE_SECONDS = 60.0
_IN_PLACE_SECONDS = 3600.0
"""After which a worker that does not commit has lost its claim: weights that wait beside the live
ones only change places; in place, they are loaded."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObservedWeights:
    """How a replica stands with its weights now.

    `version`: of the worker that is attached; None without one. Its digest is empty where the
    ranks of a replica differ, and `trouble` says how. `prepared`: what waits there for a commit.
    `preparing`: the id of the update that is being prepared; empty: none. `is_switching`: somebody
    waits for an exchange. `is_waiting`: its weights are not to answer, so that it does nothing
    until it has others.
    """

    version: WeightVersion | None
    prepared: PreparedUpdate | None = None
    preparing: str = ""
    is_switching: bool = False
    is_paused: bool = False
    is_waiting: bool = False
    trouble: str = ""


class Subject(Protocol):
    """The replica, as far as it changes with its weights."""

    number: int
    serving: Serving

    @property
    def attached(self) -> bool:
        """Whether its worker is there."""
        ...


class ReplicaWeights:
    """One replica's weights. Everything runs on the fleet's loop.

    Whoever is lost in the middle of `prepare` or `switch` looks at `observed` once the replica is
    attached again: that says what has come of it.
    """

    def __init__(
        self,
        replica: Subject,
        worker: Worker,
        pipeline: Pipeline,
        served: ServedWeights,
        clock: Clock,
        metrics: ReplicaMetrics,
    ) -> None:
        self._replica = replica
        self._worker = worker
        self._pipeline = pipeline
        self._served = served
        self._clock = clock
        self._metrics = metrics
        self._claim_end: asyncio.Future[None] | None = None
        self._prepared: PreparedUpdate | None = None
        self._preparing = ""
        self._beside = ""
        """The update that was prepared beside the live weights, here and last."""
        self._is_paused = False
        self._pausing: Interlude | None = None
        """What is to pause it, or has."""

    # --- how it stands ------------------------------------------------------------------------

    def observed(self) -> ObservedWeights:
        """How it stands now."""
        attachment = self._replica.serving.attachment
        if not self._replica.attached or attachment is None:
            is_paused = self._is_paused or self._served.is_paused
            return ObservedWeights(None, is_paused=is_paused)
        info = attachment.info
        return ObservedWeights(
            version=self._served.named(info.weight_version),
            prepared=self._prepared,
            preparing=self._preparing,
            is_switching=self._pipeline.interlude is not None,
            is_paused=self._is_paused or self._served.is_paused,
            is_waiting=not self._served.may_answer(info.weight_version.digest),
            trouble=info.weights_trouble,
        )

    @property
    def may_answer(self) -> bool:
        """Whether the weights of the worker that is attached, or was last, are to answer."""
        attachment = self._replica.serving.attachment
        return attachment is None or self._served.may_answer(attachment.info.weight_version.digest)

    @property
    def is_held(self) -> bool:
        """Whether nobody should begin here now."""
        return self._pipeline.is_held or self._pipeline.interlude is not None

    def attached(self) -> None:
        """A claim begins. What was prepared in an earlier one may still be."""
        self._claim_end = asyncio.get_running_loop().create_future()
        attachment = self._replica.serving.attachment
        assert attachment is not None
        self._prepared = attachment.info.prepared
        self.look()

    def lost(self) -> None:
        """The claim is over."""
        if self._claim_end is not None and not self._claim_end.done():
            self._claim_end.set_result(None)
        self._prepared = None
        interlude, self._pipeline.interlude = self._pipeline.interlude, None
        if interlude is not None:
            interlude.fail(WorkerLost(interlude.trouble))

    def look(self) -> None:
        """Which weights answer may have changed."""
        self._pipeline.is_held = self._is_paused or self._served.is_paused or not self.may_answer
        self._adopt_own()
        self._pipeline.wake()

    # --- what a rollout asks ------------------------------------------------------------------

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        """Prepares other weights while steps go on. Raises WorkerLost or WorkerRefused.

        Cancelled, it leaves to `abort` what the worker has begun.
        """
        if self._preparing:
            raise WorkerRefused(
                RefusalReason.UPDATE_CONFLICT, f"update {self._preparing!r} is being prepared"
            )
        self._preparing = update.update_id
        try:
            prepared = await self._in_claim(self._port().prepare(update))
        finally:
            self._preparing = ""
        self._prepared = PreparedUpdate(prepared.update_id, prepared.digest)
        self._beside = update.update_id if prepared.placement is Placement.BESIDE else ""
        return prepared

    async def abort(self, update_id: str) -> None:
        """Drops what is prepared, or ends its preparation. Raises WorkerLost or WorkerRefused."""
        await self._in_claim(self._port().abort(update_id))
        if self._prepared is not None and self._prepared.update_id == update_id:
            self._prepared = None

    async def switch(self, update_id: str, digest: str, policy: InFlightPolicy) -> WeightVersion:
        """Commits what is prepared, between two steps. `policy` says what becomes of what runs.

        Returns once every further step is one of the new weights. Raises WorkerRefused, when the
        old weights go on, or WorkerLost, when nobody knows: see `observed`. Cancelled, it is called
        off unless it has begun; then it comes to its end without anybody who waits.
        """
        if not self.may_answer and policy is InFlightPolicy.FINISH_ON_OLD:
            policy = InFlightPolicy.ABORT  # nobody will finish on weights that may not answer
        port = self._port()
        started = self._clock()
        limit = _BESIDE_SECONDS if update_id == self._beside else _IN_PLACE_SECONDS

        async def commit() -> WeightVersion:
            began = self._clock()
            try:
                async with asyncio.timeout(limit):
                    version = self._served.named(await port.commit(update_id, digest))
            except TimeoutError:
                raise WorkerLost(f"weights are not exchanged after {limit:.0f} s") from None
            self._prepared = None
            self._replica.serving.exchange(version)
            self._metrics.weights_exchanged("done", self._clock() - began)
            self.look()
            return version

        try:
            version = await self._between_steps(Interlude(policy, commit))
        except WorkerRefused:
            self._metrics.weights_exchanged("refused", 0.0)
            raise
        except WorkerLost:
            self._metrics.weights_exchanged("lost", 0.0)
            raise
        _logger.info(
            "weights exchanged",
            extra=fields(
                replica=self._replica.number,
                weight_version=version.digest[:12],
                weights_name=version.name,
                policy=policy.value,
                seconds=round(self._clock() - started, 3),
            ),
        )
        return version

    async def pause(self, policy: InFlightPolicy = InFlightPolicy.KEEP_KV) -> None:
        """Plans no further step until `resume`; what is queued, or comes, waits. Idempotent.

        Returns once nothing is in flight. `policy`: what becomes of what runs. With KEEP_KV it
        stays as it is. With CONTINUE_ON_NEW it keeps its tokens and gives up its KV, all that is
        cached with it: then the worker may free that. With FINISH_ON_OLD it ends before, and with
        ABORT at once. A replica without a worker is paused when it gets one. Raises WorkerLost
        when its worker is lost meanwhile; it is paused then as well.
        """
        if policy is not InFlightPolicy.FINISH_ON_OLD or not self._replica.attached:
            self._pauses()
        attachment = self._replica.serving.attachment
        if not self._replica.attached or attachment is None:
            return
        version = self._served.named(attachment.info.weight_version)

        async def stop() -> WeightVersion:
            self._pauses()
            return version

        changes = policy is not InFlightPolicy.KEEP_KV
        self._pausing = Interlude(policy, stop, changes=changes)
        await self._between_steps(self._pausing)

    def resume(self) -> None:
        """Goes on; a pause that was still to come does not. Idempotent."""
        self._is_paused = False
        if self._pausing is not None and not self._pausing.has_begun:
            self._call_off(self._pausing)
        self._pausing = None
        self.look()

    # --- how that is done ---------------------------------------------------------------------

    def _adopt_own(self) -> None:
        """Weights that were not to answer may now: they are new to whoever began with others."""
        serving = self._replica.serving
        attachment, traits = serving.attachment, serving.traits
        if not self._replica.attached or attachment is None or traits is None:
            return
        version = attachment.info.weight_version
        is_new = traits.weight_digest != version.digest and self.may_answer
        if not is_new or self._pipeline.interlude is not None:
            return

        async def adopt() -> WeightVersion:
            named = self._served.named(version)
            serving.exchange(named)
            return named

        continues = self._served.continues
        policy = InFlightPolicy.CONTINUE_ON_NEW if continues else InFlightPolicy.ABORT
        self._pipeline.interlude = Interlude(policy, adopt)

    def _pauses(self) -> None:
        self._is_paused = True
        self.look()

    def _port(self) -> WeightsWorker:
        if not self._replica.attached:
            raise WorkerLost("not attached")
        if not isinstance(self._worker, WeightsWorker):
            raise WorkerRefused(RefusalReason.UNKNOWN, "its weights can't be exchanged")
        return self._worker

    async def _between_steps(self, interlude: Interlude) -> WeightVersion:
        if self._pipeline.interlude is not None:
            raise WorkerRefused(
                RefusalReason.UPDATE_CONFLICT,
                "it is about to exchange weights or to pause",
            )
        self._pipeline.interlude = interlude
        self._pipeline.wake()
        try:
            return await asyncio.shield(interlude.outcome)
        except asyncio.CancelledError:
            if not interlude.has_begun:
                self._call_off(interlude)
            raise

    def _call_off(self, interlude: Interlude) -> None:
        if self._pipeline.interlude is interlude:
            self._pipeline.interlude = None
        interlude.fail(WorkerLost("it was called off"))
        self._pipeline.wake()

    async def _in_claim(self, call: Coroutine[Any, Any, T]) -> T:
        """The outcome of a call to the worker, or WorkerLost when the claim ends before."""
        assert self._claim_end is not None
        task = asyncio.create_task(call)
        try:
            await asyncio.wait((task, self._claim_end), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WorkerLost("the claim has ended")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

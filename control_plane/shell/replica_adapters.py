"""The adapters of one replica: which its worker holds, and how it gets those that the core asks
for, while steps go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from control_plane.core.adapters import AdapterLoad
from control_plane.core.scheduler import Scheduler
from control_plane.shell.adapter_registry import AdapterRegistry
from control_plane.shell.listeners import Register
from control_plane.shell.ports import (
    AdaptersWorker,
    Admit,
    Attachment,
    Clock,
    RefusalReason,
    Worker,
    WorkerLost,
    WorkerRefused,
)
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_PASSING = (RefusalReason.STALE_EPOCH, RefusalReason.ADAPTER_IN_USE, RefusalReason.SOURCE_LOST)
"""Refusals that are not the adapter's fault."""


class ReplicaAdapters:
    """Claims the worker of a replica, with what it holds. `register` gets who ends because a load
    fails; `wake` is called when somebody may begin."""

    def __init__(
        self,
        number: int,
        worker: Worker,
        registry: AdapterRegistry,
        register: Register,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        self._number = number
        self._worker = worker
        self._registry = registry
        self._register = register
        self._clock = clock
        self._wake = wake
        self._loading: set[asyncio.Task[None]] = set()
        self.held: dict[int, str] = {}
        """Digests by slot, as the worker told when it was claimed."""

    async def attach(self, admit: Admit) -> Attachment:
        """Claims the worker, and asks what its slots hold."""
        self.held = {}
        attachment = await self._worker.attach(admit=admit)
        if attachment.info.adapter_slot_count and isinstance(self._worker, AdaptersWorker):
            self.held = await self._worker.list_adapters()
        return attachment

    async def detach(self) -> None:
        """The claim is over. What is being loaded is nobody's any more."""
        loading, self._loading = self._loading, set()
        for task in loading:
            task.cancel()
        if loading:
            await asyncio.wait(loading)
        await self._worker.detach()

    def load(self, core: Scheduler) -> None:
        """Loads what the core asks for now."""
        core.adapters.pin(self._registry.pinned)
        for load in core.adapters.take_loads():
            task = asyncio.create_task(self._load(core, load))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)

    async def _load(self, core: Scheduler, load: AdapterLoad) -> None:
        started = self._clock()
        told: dict[str, str | int] = {
            "replica": self._number,
            "adapter": load.name,
            "adapter_digest": load.digest[:12],
        }
        try:
            assert isinstance(self._worker, AdaptersWorker), "a worker without slots"
            files = self._registry.files(load.digest)
            if files is None:
                raise WorkerRefused(RefusalReason.INVALID_UPDATE, "it is not registered any more")
            await self._worker.load_adapter(load.slot, files)
        except (WorkerLost, WorkerRefused) as error:
            is_passing = isinstance(error, WorkerLost) or error.reason in _PASSING
            _logger.warning("an adapter was not loaded", extra=fields(**told, error=str(error)))
            if is_passing:
                await asyncio.sleep(_RETRY_SECONDS)
                core.adapters.lost(load)
            else:
                text = f"the adapter {load.name!r} can't be loaded: {error}"
                self._register.deliver(core.adapters.refused(load, text), self._clock())
        else:
            core.adapters.loaded(load)
            seconds = round(self._clock() - started, 3)
            _logger.info("adapter loaded", extra=fields(**told, slot=load.slot, seconds=seconds))
        self._wake()

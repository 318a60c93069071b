"""Adapters come and go while steps run: read and prepared beside them, put in place between two.

Everything here runs on the event loop. Files are read, numbers are checked and matrices are packed
on other threads; the device's own thread only exchanges what a slot points to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from worker_service.device_errors import is_out_of_memory, one_line
from worker_service.domain.adapters import Adapter, LoadedAdapter
from worker_service.domain.errors import MemoryLacking, UpdateInvalid
from worker_service.domain.weights import TensorChunk, TensorDescription
from worker_service.facade import WorkerFacade
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.interface import Adaptable
from worker_service.weights.adapter_reader import AdapterOutline, outline_adapter, read_adapter
from worker_service.weights.chunks import ChunkOrder
from worker_service.weights.paths import allowed_path

T = TypeVar("T")

_MOST_LOADS = 8


@dataclass(frozen=True, slots=True)
class DiskAdapter:
    """A folder that the worker's operator allows."""

    path: str


@dataclass(frozen=True, slots=True)
class StreamedAdapter:
    """An adapter whose tensors follow in chunks, in this order."""

    config_json: str
    tensors: tuple[TensorDescription, ...]


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """What to load where. `expected_digest` empty: not checked."""

    epoch: int
    slot: int
    expected_digest: str
    source: DiskAdapter | StreamedAdapter


class AdapterLoading:
    """Loads, unloads and lists the adapters of a facade's runner.

    Every method raises WorkerUnavailable; those with an epoch raise StaleEpoch, too.
    """

    def __init__(self, facade: WorkerFacade, weights_root: Path | None) -> None:
        """`weights_root`: the folder below which adapters may be read, None: nowhere."""
        self._facade = facade
        self._root = weights_root
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[LoadedAdapter]] = set()
        self._load_count = 0

    async def load(
        self, update: AdapterUpdate, chunks: AsyncIterator[TensorChunk]
    ) -> LoadedAdapter:
        """Loads an adapter into a slot that no row uses, while steps go on.

        Raises UpdateInvalid, AdapterInUse, SourceLost, or MemoryLacking, with nothing changed.
        """
        slots = self._slots(update.epoch, update.slot)
        await (
            await self._facade.on_device(lambda: slots.require_unused(update.slot), update.epoch)
        )
        if self._load_count >= _MOST_LOADS:
            raise MemoryLacking(f"{_MOST_LOADS} adapters are being loaded already")
        self._load_count += 1
        try:
            adapter = await self._read(update, chunks, slots)
            # Once begun it goes on, also when nobody waits any more: the next load needs its turn.
            settling = asyncio.create_task(self._settle(update, adapter, slots))
            self._running.add(settling)
            settling.add_done_callback(self._settled)
            return await asyncio.shield(settling)
        finally:
            self._load_count -= 1

    async def unload(self, epoch: int, slot: int) -> None:
        """Empties a slot. Raises AdapterInUse or UpdateInvalid."""
        slots = self._slots(epoch, slot)
        await (await self._facade.on_device(lambda: slots.clear(slot), epoch))

    async def held(self) -> tuple[LoadedAdapter, ...]:
        """What the slots hold, by slot."""
        slots = self._slots(self._facade.worker_info().epoch)
        return await (await self._facade.on_device(slots.held))

    def _slots(self, epoch: int, slot: int | None = None) -> AdapterSlots:
        """The runner's slots, of which one may be meant. Raises StaleEpoch or UpdateInvalid."""
        self._facade.require_claim(epoch)
        runner = self._facade.log.runner
        assert isinstance(runner, Adaptable), "a runner that takes no adapters"
        slots = runner.adapters
        count = slots.limits.slot_count
        if slot is not None and not 1 <= slot <= count:
            raise UpdateInvalid(
                "update.slot",
                f"{slot} is no slot: they count from 1 to {count}"
                if count
                else "this worker has none; start it with --max-loras",
            )
        return slots

    async def _read(
        self, update: AdapterUpdate, chunks: AsyncIterator[TensorChunk], slots: AdapterSlots
    ) -> Adapter:
        match update.source:
            case DiskAdapter(path):
                async for _ in chunks:
                    raise UpdateInvalid("chunk", "only a streamed adapter has chunks")
                adapter = await asyncio.to_thread(
                    lambda: read_adapter(
                        allowed_path(path, self._root), slots.modules, slots.limits
                    )
                )
            case StreamedAdapter(config_json, tensors):
                outline = await asyncio.to_thread(
                    outline_adapter, config_json, tensors, slots.modules, slots.limits
                )
                buffers = outline.buffers()
                await self._receive(update.epoch, outline, buffers, chunks)
                adapter = await asyncio.to_thread(outline.finish, buffers)
        digest = adapter.description.digest
        if update.expected_digest not in ("", digest):
            raise UpdateInvalid("update.expected_digest", f"the adapter has {digest}")
        return adapter

    async def _receive(
        self,
        epoch: int,
        outline: AdapterOutline,
        buffers: list[bytearray],
        chunks: AsyncIterator[TensorChunk],
    ) -> None:
        """Fills the buffers. Raises UpdateInvalid for a chunk that is not the next, or a tensor
        with another digest than was said, and SourceLost where some are missing."""
        order = ChunkOrder(outline.tensors)
        async for chunk in chunks:
            self._facade.require_claim(epoch)
            place = order.take(chunk)
            buffers[place.tensor_index][place.start : place.end] = chunk.data
        order.finish()

    async def _settle(
        self, update: AdapterUpdate, adapter: Adapter, slots: AdapterSlots
    ) -> LoadedAdapter:
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(slots.prepare, adapter)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryLacking(
                    f"no memory for an adapter ({one_line(error)}); the slots take "
                    f"{slots.byte_count} bytes in all"
                ) from error
            return await (
                await self._facade.on_device(lambda: slots.put(update.slot, adapter), update.epoch)
            )

    def _settled(self, task: asyncio.Task[LoadedAdapter]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # perhaps nobody waits; whoever does gets it

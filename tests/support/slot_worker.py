"""A fake worker with adapter slots. An adapter's tokens are others than the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256

from control_plane.core.plan import StepPlan, StepResult
from control_plane.shell.adapter_files import AdapterFiles
from control_plane.shell.ports import RefusalReason, WorkerInfo, WorkerRefused
from tests.simulation.fake_machine import (
    WEIGHTS,
    Machine,
    advance,
    expected_tokens,
    first_state,
    sample,
)
from tests.simulation.fake_worker import FakeWorker, no_delay
from tests.support.plan_interpreter import WorkerRow


def files_at(folder: str) -> AdapterFiles:
    """No file is read. Folders that begin with "bad" hold what doesn't fit."""
    return AdapterFiles(folder, sha256(folder.encode()).hexdigest(), "{}", ())


def made_with(weights: str, adapter: str) -> str:
    """What tokens depend on, as one digest."""
    return sha256((weights + adapter).encode()).hexdigest() if adapter else weights


def expected(
    prompt: list[int], count: int, adapter: str = "", seed: int = 0, weights: str = WEIGHTS
) -> list[int]:
    """What a request gets with an adapter, by its digest, whatever runs beside it."""
    return expected_tokens(prompt, count, seed, made_with(weights, adapter))


@dataclass(slots=True, eq=False)
class SlotMachine(Machine):
    """A machine with slots. Adapters stay over claims, and are gone with its life."""

    slot_count: int = 2
    adapters: dict[int, str] = field(default_factory=dict)

    def info(self) -> WorkerInfo:
        return replace(Machine.info(self), adapter_slot_count=self.slot_count)

    def restart(self) -> None:
        Machine.restart(self)
        self.adapters.clear()

    def load(self, slot: int, files: AdapterFiles) -> None:
        """LoadAdapter."""
        assert 1 <= slot <= self.slot_count
        if any(row.adapter_slot == slot for row in self.rows.values()):
            raise WorkerRefused(RefusalReason.ADAPTER_IN_USE, f"a row uses slot {slot}")
        if files.folder.startswith("bad"):
            raise WorkerRefused(RefusalReason.INVALID_UPDATE, "the tensors don't fit")
        self.adapters[slot] = files.digest

    def execute(self, plan: StepPlan) -> StepResult:
        for added in plan.added:
            if self.adapters.get(added.adapter_slot, "") != added.adapter_digest:
                raise WorkerRefused(RefusalReason.PLAN_MISMATCH, "the slot holds another adapter")
        return Machine.execute(self, plan)

    def _sample(self, row: WorkerRow) -> int:
        return sample(self._read(row, len(row.tokens) - 1), row.seed, self._made_with(row))

    def _write(self, row: WorkerRow, position: int) -> None:
        state = self._read(row, position - 1) if position else first_state(self._made_with(row))
        self.kv[self._slot(row, position)] = advance(state, row.tokens[position])

    def _made_with(self, row: WorkerRow) -> str:
        return made_with(self.digest, self.adapters[row.adapter_slot] if row.adapter_slot else "")


class SlotWorker(FakeWorker):
    """`load_seconds`: how long a load takes. `loads` counts those that came to an end."""

    machine: SlotMachine

    def __init__(
        self,
        machine: SlotMachine,
        step_seconds: Callable[[], float] = no_delay,
        load_seconds: float = 0.0,
    ) -> None:
        super().__init__(machine, step_seconds)
        self.load_seconds = load_seconds
        self.loads = 0

    async def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        await self._takes(self.load_seconds)
        self.machine.load(slot, files)
        self.loads += 1

    async def list_adapters(self) -> dict[int, str]:
        await asyncio.sleep(0)
        return dict(self.machine.adapters)

"""One step's inputs as every way of computing it reads them. Values only: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from worker_service.domain.columns import IntColumn


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """R sequences and their T scheduled tokens, one sequence after another; int32 on the host.

    `query_starts` [R + 1], prefix sum of the sequences' token counts, each at least 1;
    `context_lengths` [R], tokens attended to, the scheduled ones included; `block_tables`
    [R, blocks of the longest context], padded with the null block; `positions`, `slots`,
    `token_ids` [T]. A token's KV goes to its slot, block · block_size + offset; the compiled
    kernels write none below 0. `adapter_slots` [R], the slot of each sequence's adapter, 0 for
    none; None where no sequence has one.
    """

    query_starts: IntColumn
    context_lengths: IntColumn
    block_tables: IntColumn
    positions: IntColumn
    slots: IntColumn
    token_ids: IntColumn
    adapter_slots: IntColumn | None = None

    @property
    def query_lengths(self) -> IntColumn:
        """Scheduled tokens of each sequence, int32 [R]."""
        return self.query_starts[1:] - self.query_starts[:-1]

    @property
    def token_count(self) -> int:
        return int(self.positions.size)

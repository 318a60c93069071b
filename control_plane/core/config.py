"""The scheduler's limits, resolved once per worker. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one worker can hold and how it is shared.

    `block_count` includes the null block, which is never handed out. `max_inflight_step_count` is
    how many plans may be ahead of their results; 1 is plain synchronous scheduling. A worker
    with `pipeline_stage_count` stages works on as many steps at once. A request that has waited for
    `ageing_seconds` is worth one priority level more. A decoding row verifies up to
    `max_draft_token_count` drafts of the worker's own drafter in a step; 0: there is none. A plan
    adds sequences of `max_added_token_count` tokens in all, or one longer one: that bounds its
    message, and how long both planes' loops are busy with it. The worker holds up to
    `adapter_slot_count` adapters at once, in slots from 1 on.

    Raises ValueError for values that could not work, among them a pool that cannot hold one
    sequence of the greatest length: that one always fits is what keeps preemption from running in
    circles.
    """

    max_sequence_count: int
    max_step_token_count: int
    max_sequence_token_count: int
    block_count: int
    block_size: int
    max_waiting_count: int = 1024
    max_inflight_step_count: int = 2
    pipeline_stage_count: int = 1
    enable_prefix_caching: bool = True
    ageing_seconds: float = 10.0
    max_draft_token_count: int = 0
    max_added_token_count: int = 2**18
    adapter_slot_count: int = 0

    def __post_init__(self) -> None:
        counts = (
            ("max_sequence_count", self.max_sequence_count, 1),
            ("max_step_token_count", self.max_step_token_count, 1),
            ("max_sequence_token_count", self.max_sequence_token_count, 2),
            ("block_count", self.block_count, 2),
            ("block_size", self.block_size, 1),
            ("max_waiting_count", self.max_waiting_count, 1),
            ("max_inflight_step_count", self.max_inflight_step_count, 1),
            ("pipeline_stage_count", self.pipeline_stage_count, 1),
            ("max_draft_token_count", self.max_draft_token_count, 0),
            ("max_added_token_count", self.max_added_token_count, 1),
            ("adapter_slot_count", self.adapter_slot_count, 0),
        )
        for name, value, least in counts:
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0.0 < self.ageing_seconds < float("inf"):
            raise ValueError(f"ageing_seconds must be positive, not {self.ageing_seconds}")
        usable = self.usable_block_count * self.block_size
        if usable < self.max_sequence_token_count:
            raise ValueError(
                f"the pool holds {usable} tokens, a sequence of max_sequence_token_count needs "
                f"{self.max_sequence_token_count}"
            )

    @property
    def max_live_count(self) -> int:
        """Sequences that may be here at once: one for each row, and those that wait for a row.

        Not the waiting ones are counted but all, so that a row that is free just now counts: a
        burst that the rows can take is not refused because it comes between two steps.
        """
        return self.max_sequence_count + self.max_waiting_count

    @property
    def usable_block_count(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.block_count - 1

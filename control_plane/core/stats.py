"""What the scheduler counts, and the snapshot others read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.core.events import FinishReason


@dataclass(slots=True, eq=False)
class Counters:
    """Only ever grow; a resync does not reset them."""

    submitted: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot. Sequences and steps are counts of now; the rest below grows monotonically.

    The KV tokens are slots of the pool by state and add up to it: `kv_active_tokens` in blocks
    that running sequences hold, `kv_cached_tokens` in blocks that only the prefix cache keeps,
    `kv_free_tokens` in blank blocks. A prompt token counts once, as computed (`prompt_tokens`) or
    as found in the cache (`cached_prompt_tokens`); computed again after a preemption or the loss of
    a worker it is one of `recomputed_tokens`, as is a generated token.
    """

    running: int
    waiting: int
    inflight: int
    kv_active_tokens: int
    kv_cached_tokens: int
    kv_free_tokens: int
    submitted: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    finished: Mapping[FinishReason, int]

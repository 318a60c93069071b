"""What may run at once: the smallest of the worker's limits, the pool's and the configured ones."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from control_plane.core.config import SchedulerConfig
from control_plane.shell.ports import MemoryPool, WorkerInfo, WorkerUnusable
from twinplane.bounds import WORKER_MESSAGE_BYTES
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_ENVELOPE_BYTES = 4 * 1024 * 1024
"""Of a message's bytes, what is kept for all but one sequence's tokens and blocks."""


@dataclass(frozen=True, slots=True)
class SchedulingSettings:
    """What the operator chose. None: the worker's own limit."""

    max_sequence_count: int | None = None
    max_step_token_count: int | None = None
    max_sequence_token_count: int | None = None
    max_waiting_count: int = 1024
    async_scheduling: bool = True
    enable_prefix_caching: bool = True
    ageing_seconds: float = 10.0


def scheduler_config(
    settings: SchedulingSettings, info: WorkerInfo, pool: MemoryPool
) -> SchedulerConfig:
    """The core's limits with this worker. A sequence must fit the pool when it runs alone.

    Raises WorkerUnusable when nothing could run, or when the worker computes only a part of a step.
    """
    if info.rank_count != 1:
        raise WorkerUnusable(
            f"the worker is one of {info.rank_count} ranks, which must execute each plan together"
        )
    try:
        return _smallest_limits(settings, info, pool)
    except ValueError as error:
        raise WorkerUnusable(str(error)) from error


def _smallest_limits(
    settings: SchedulingSettings, info: WorkerInfo, pool: MemoryPool
) -> SchedulerConfig:
    pool_token_count = (pool.block_count - 1) * pool.block_size
    stage_count = info.ranks.pipeline[1]
    # One step more than there are stages, so that the first stage has the next one at hand.
    inflight_count = min(
        stage_count + 1 if settings.async_scheduling else 1, info.max_inflight_step_count
    )
    bytes_per_token = _varint_bytes(info.vocabulary_size)
    bytes_per_token += -(-_varint_bytes(pool.block_count) // max(pool.block_size, 1))
    return SchedulerConfig(
        max_sequence_count=_smaller(settings.max_sequence_count, info.max_sequence_count),
        max_step_token_count=_smaller(settings.max_step_token_count, info.max_step_token_count),
        max_sequence_token_count=min(
            _smaller(settings.max_sequence_token_count, info.max_sequence_token_count),
            # A preempted sequence is added again whole, output and all.
            info.max_prompt_token_count,
            pool_token_count,
            # Added whole, it has to fit one message.
            (WORKER_MESSAGE_BYTES - _ENVELOPE_BYTES) // bytes_per_token,
        ),
        block_count=pool.block_count,
        block_size=pool.block_size,
        max_waiting_count=settings.max_waiting_count,
        max_inflight_step_count=inflight_count,
        pipeline_stage_count=min(stage_count, inflight_count),
        enable_prefix_caching=settings.enable_prefix_caching,
        ageing_seconds=settings.ageing_seconds,
        adapter_slot_count=info.adapter_slot_count,
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a worker can hold at once, for people: `full_length_sequence_count` sequences of
    `max_sequence_token_count` tokens fit into the KV pool's `kv_token_count`.
    """

    kv_token_count: int
    max_sequence_token_count: int
    max_sequence_count: int
    full_length_sequence_count: int


def capacity_of(config: SchedulerConfig) -> Capacity:
    """What these limits leave. Each sequence takes whole blocks."""
    blocks_each = -(-config.max_sequence_token_count // config.block_size)
    return Capacity(
        kv_token_count=config.usable_block_count * config.block_size,
        max_sequence_token_count=config.max_sequence_token_count,
        max_sequence_count=config.max_sequence_count,
        full_length_sequence_count=min(
            config.usable_block_count // blocks_each, config.max_sequence_count
        ),
    )


def log_attached(
    replica: int, info: WorkerInfo, capacity: Capacity, sequence_count: int, *, kv_kept: bool
) -> None:
    """Says that a worker was claimed, and what it can hold. `sequence_count`: who goes on there."""
    _logger.info(
        "worker attached",
        extra=fields(
            replica=replica,
            worker_id=info.worker_id,
            incarnation_id=info.incarnation_id,
            epoch=info.epoch,
            model=info.model_name,
            device=info.device,
            weight_version=info.weight_version.digest[:12],
            sequence_count=sequence_count,
            kv_kept=kv_kept,
            **asdict(capacity),
        ),
    )


@dataclass(frozen=True, slots=True)
class Clamp:
    """A limit that was asked for, and the smaller one that holds with this worker."""

    setting: str
    asked: int
    used: int


def clamps(settings: SchedulingSettings, config: SchedulerConfig) -> list[Clamp]:
    """The limits that the worker or its KV pool makes smaller than they were asked for."""
    pairs = (
        ("--max-num-seqs", settings.max_sequence_count, config.max_sequence_count),
        ("--max-num-batched-tokens", settings.max_step_token_count, config.max_step_token_count),
        ("--max-model-len", settings.max_sequence_token_count, config.max_sequence_token_count),
    )
    return [Clamp(name, asked, used) for name, asked, used in pairs if asked and asked > used]


class ClampLog:
    """Says that less holds with a worker than was asked for: once, until it changes."""

    def __init__(self, replica: int) -> None:
        self._replica = replica
        self._told: list[Clamp] = []

    def tell(self, found: list[Clamp]) -> None:
        """Logs those that were not there with the worker before."""
        for clamp in found:
            if clamp not in self._told:
                _logger.warning(
                    "a limit is lowered to what the worker can do",
                    extra=fields(
                        replica=self._replica,
                        setting=clamp.setting,
                        asked=clamp.asked,
                        used=clamp.used,
                    ),
                )
        self._told = found


def _varint_bytes(number: int) -> int:
    """What a number up to this takes in a packed field."""
    return max(1, -(-number.bit_length() // 7))


def _smaller(configured: int | None, limit: int) -> int:
    return limit if configured is None else min(configured, limit)

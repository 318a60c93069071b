"""The control plane's settings: what is checked, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.shell.limits import SchedulingSettings, scheduler_config
from control_plane.shell.ports import MemoryPool, RankCoordinates, WorkerUnusable
from tests.simulation.fake_machine import Machine
from twinplane.settings.control import ControlConfig


def test_the_defaults_are_loopback() -> None:
    config = ControlConfig()
    assert config.host == config.metrics_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("metrics_port", 70000),
        ("worker", "localhost"),
        ("worker", "http://127.0.0.1:50061"),
        ("worker", "grpc://127.0.0.1:50061"),
        ("worker", "127.0.0.1:"),
        ("worker", ":50061"),
        ("worker", "127.0.0.1:0"),
        ("worker", "127.0.0.1:65536"),
        ("worker", "127.0.0.1:http"),
        ("worker", "unix:"),
        ("worker", "/run/worker.sock"),
        ("worker", ""),
        ("worker", "a:1 a:1"),
        ("worker", "a:1,b:1 b:1"),
        ("workers_file", ""),
        ("workers_dns", ""),
        ("workers_dns", "workers"),
        ("workers_dns", "dns:///workers:50061"),
        ("workers_dns", "unix:/run/a.sock"),
        ("workers_refresh_seconds", 0.0),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -5),
        ("max_num_waiting", 0),
        ("tokenizer_threads", 0),
        ("ageing_seconds", 0.0),
        ("ageing_seconds", float("nan")),
        ("worker_loss_patience", -1.0),
        ("drain_grace_seconds", -0.1),
        ("drain_grace_seconds", float("inf")),
    ],
)
def test_what_can_not_work_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ControlConfig(**{name: value})


@pytest.mark.parametrize(
    "worker",
    [
        "localhost:1",
        "[::1]:50061",
        "unix:/run/a.sock",
        "unix:a",
        "dns:///gpu:50061",
        "ipv4:1.2.3.4:5",
    ],
)
def test_addresses_that_grpc_takes_are_taken(worker: str) -> None:
    assert ControlConfig(worker=worker).worker == worker


def test_the_usual_worker_is_meant_only_where_nothing_else_says_where_workers_are() -> None:
    assert ControlConfig().replicas == ("127.0.0.1:50061",)
    assert ControlConfig(workers_file="/run/workers").replicas == ()
    assert ControlConfig(workers_dns="workers:50061").replicas == ()
    both = ControlConfig(worker="a:1 b:1,c:1", workers_dns="[fd00::1]:50061")
    assert both.replicas == ("a:1", "b:1,c:1")


def limits(settings: SchedulingSettings, machine: Machine, *, pool: MemoryPool) -> Any:
    return scheduler_config(settings, machine.claim(1).info, pool)


def test_unset_limits_are_the_workers() -> None:
    config = limits(SchedulingSettings(), Machine(), pool=MemoryPool(100, 4))
    assert config.max_sequence_count == 4
    assert config.max_step_token_count == 16
    assert config.max_sequence_token_count == 64
    assert config.max_inflight_step_count == 2


def test_set_limits_only_lower_the_workers() -> None:
    high = SchedulingSettings(99, 99, 99)
    low = SchedulingSettings(2, 8, 32, async_scheduling=False)
    pool = MemoryPool(100, 4)
    assert limits(high, Machine(), pool=pool).max_sequence_count == 4
    config = limits(low, Machine(), pool=pool)
    assert config.max_sequence_count == 2
    assert config.max_step_token_count == 8
    assert config.max_sequence_token_count == 32
    assert config.max_inflight_step_count == 1


@pytest.mark.parametrize(
    ("stages", "asynchronous", "worker", "inflight", "used"),
    [
        (1, True, 4, 2, 1),
        (2, True, 4, 3, 2),
        (3, True, 4, 4, 3),
        (8, True, 9, 9, 8),
        (8, True, 4, 4, 4),
        (2, True, 1, 1, 1),
        (1, False, 4, 1, 1),
        (4, False, 5, 1, 1),
    ],
)
def test_a_step_more_than_there_are_stages_is_in_flight(
    stages: int, asynchronous: bool, worker: int, inflight: int, used: int
) -> None:
    info = replace(
        Machine().claim(1).info,
        ranks=RankCoordinates(pipeline=(0, stages)),
        max_inflight_step_count=worker,
    )
    settings = SchedulingSettings(async_scheduling=asynchronous)
    config = scheduler_config(settings, info, MemoryPool(100, 4))
    assert (config.max_inflight_step_count, config.pipeline_stage_count) == (inflight, used)


def test_a_sequence_is_never_longer_than_the_pool() -> None:
    config = limits(SchedulingSettings(), Machine(), pool=MemoryPool(9, 4))
    assert config.max_sequence_token_count == 32


def test_a_pool_without_room_for_a_sequence_makes_the_worker_unusable() -> None:
    with pytest.raises(WorkerUnusable, match="max_sequence_token_count"):
        limits(SchedulingSettings(), Machine(), pool=MemoryPool(1, 4))


def test_a_worker_that_is_one_of_several_ranks_is_not_driven_alone() -> None:
    info = replace(Machine().claim(1).info, rank_count=2)
    with pytest.raises(WorkerUnusable, match="2 ranks"):
        scheduler_config(SchedulingSettings(), info, MemoryPool(100, 4))

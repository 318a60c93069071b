"""Which rank a worker is, by its settings and by the place where it runs."""

from __future__ import annotations

import itertools

import pytest

from twinplane.settings.worker import WorkerConfig
from worker_service.ranks import RanksInvalid, rendezvous_host, resolve_ranks

KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3)))


def group(index: object, size: object) -> dict[str, str]:
    return {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": str(size), **KUBERNETES}


def config(tensor: int = 1, pipeline: int = 1, data: int = 1, **settings: int) -> WorkerConfig:
    return WorkerConfig(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=data,
        **settings,  # type: ignore[arg-type]
    )


def places(tensor: int, pipeline: int, data: int) -> list[tuple[int, int, int]]:
    """(data, pipeline, tensor) of each rank, in order."""
    return list(itertools.product(range(data), range(pipeline), range(tensor)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_way_to_say_it_gives_each_rank_one_place(sizes: tuple[int, int, int]) -> None:
    tensor, pipeline, data = sizes
    count = tensor * pipeline
    settings, ordinals, groups = [], [], []
    for number in range(count * data):
        own = config(*sizes, rank=number % count, data_parallel_rank=number // count)
        settings.append(resolve_ranks(own, {}, "gpu-7"))
        ordinals.append(resolve_ranks(config(*sizes), KUBERNETES, f"worker-{number}.set.ns"))
        in_group = config(*sizes, data_parallel_rank=number // count)
        variables = group(number % count, count)
        groups.append(resolve_ranks(in_group, variables, "lws-0-1" if count > 1 else "lws-x"))
    for found in (settings, ordinals, groups):
        assert [(each.data[0], each.pipeline[0], each.tensor[0]) for each in found] == places(
            *sizes
        )
        assert all((each.tensor[1], each.pipeline[1], each.data[1]) == sizes for each in found)
        assert [each.rank for each in found] == list(range(count)) * data


def test_a_worker_that_executes_plans_alone_asks_nobody() -> None:
    for variables in ({}, KUBERNETES, group(3, 4), group("x", "y")):
        ranks = resolve_ranks(config(), variables, "worker-9")
        assert (ranks.size, ranks.rank, ranks.data) == (1, 0, (0, 1))


def test_a_host_that_is_no_pod_has_no_ordinal() -> None:
    assert resolve_ranks(config(4), {}, "gpu-3").rank == 0
    assert resolve_ranks(config(4), KUBERNETES, "deployment-5d9c8f-x7k2p").rank == 0


@pytest.mark.parametrize(
    ("own", "variables", "host", "says"),
    [
        (config(4), group(1, 2), "p", "LWS_GROUP_SIZE is 2"),
        (config(2, 2), group(4, 4), "p", "LWS_WORKER_INDEX is 4"),
        (config(2), group("one", 2), "p", "LWS_WORKER_INDEX is 'one'"),
        (config(2), group("", 2), "p", "LWS_WORKER_INDEX is ''"),
        (config(2), group("-1", 2), "p", "LWS_WORKER_INDEX is '-1'"),
        (config(2), group("1", "two"), "p", "LWS_GROUP_SIZE is 'two'"),
        (config(2), {"LWS_WORKER_INDEX": "1"}, "p", "LWS_GROUP_SIZE is ''"),
        (config(2, rank=0), group(1, 2), "p", "rank is 0, but LWS_WORKER_INDEX is 1"),
        (config(2), KUBERNETES, "w-2", "rank 0 of replica 1"),
        (config(2, 2, 2), KUBERNETES, "w-11", "rank 3 of replica 2"),
        (config(2, 1, 3, data_parallel_rank=0), KUBERNETES, "w-2", "data_parallel_rank is 0"),
        (config(1, 1, 2), KUBERNETES, "w-2", "rank 0 of replica 2"),
        (config(2, 2, rank=4), {}, "p", "rank is 4, and there are 4"),
        (config(rank=1), {}, "p", "rank is 1, and there are 1"),
        (config(data_parallel_rank=1), {}, "p", "data_parallel_rank is 1, and there are 1"),
        (config(2, 1, 2, data_parallel_rank=2), KUBERNETES, "w-0", "data_parallel_rank is 2"),
    ],
)
def test_what_contradicts_is_an_error(
    own: WorkerConfig, variables: dict[str, str], host: str, says: str
) -> None:
    with pytest.raises(RanksInvalid) as raised:
        resolve_ranks(own, variables, host)
    assert says in str(raised.value)


def test_a_setting_wins() -> None:
    several_in_a_pod = resolve_ranks(config(4, rank=3), group(0, 2), "lws-0")
    assert several_in_a_pod.rank == 3
    assert resolve_ranks(config(4, rank=2), KUBERNETES, "w-1").rank == 2
    assert resolve_ranks(config(2, rank=1), group(1, 2), "w-0").rank == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": -1}, "rank must be at least 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be at least 1"),
        ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
        ({"local_world_size": 0}, "local_world_size must be at least 1"),
        ({"rendezvous_port": 65536}, "rendezvous_port must be at most 65535"),
    ],
)
def test_settings_that_could_never_work(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        WorkerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "variables", "host"),
    [
        (None, {}, ""),
        (None, {"LWS_LEADER_ADDRESS": "lws-0.lws.ns"}, "lws-0.lws.ns"),
        ("gpu-0", {"LWS_LEADER_ADDRESS": "lws-0.lws.ns"}, "gpu-0"),
        ("fd00::1", {}, "[fd00::1]"),
        ("[fd00::1]", {}, "[fd00::1]"),
    ],
)
def test_where_others_reach_it(setting: str | None, variables: dict[str, str], host: str) -> None:
    assert rendezvous_host(WorkerConfig(rendezvous_host=setting), variables) == host

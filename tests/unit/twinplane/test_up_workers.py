"""The workers that `twinplane up` starts."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from twinplane.cli import doctor, planes
from twinplane.cli.up_workers import UpWorker, replicas_of
from twinplane.settings.worker import WorkerConfig

FOLDER = Path("/run/up")
SIZES = list(itertools.product((1, 2, 3), (1, 2), (1, 2, 3)))


def workers(
    *flags: str, environ: dict[str, str] | None = None
) -> tuple[list[list[UpWorker]], list[WorkerConfig]]:
    """By replica, and the settings that each worker would have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    planes.add_arguments(parser)
    namespace = planes.parse(parser, flags)
    environ = environ or {}
    config = planes.resolve_worker(planes.worker_flags(namespace), environ)
    replicas = replicas_of(namespace, environ, config, FOLDER)
    each = [planes.resolve_worker(one.flags, environ) for one in itertools.chain(*replicas)]
    return replicas, each


def sized(tensor: int, pipeline: int, data: int) -> tuple[str, ...]:
    return (
        f"--tensor-parallel-size={tensor}",
        f"--pipeline-parallel-size={pipeline}",
        f"--data-parallel-size={data}",
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_rank_of_each_replica_has_a_worker(sizes: tuple[int, int, int]) -> None:
    replicas, each = workers("--simulate", *sized(*sizes))
    ranks, count = sizes[0] * sizes[1], sizes[0] * sizes[1] * sizes[2]
    assert [len(one) for one in replicas] == [ranks] * sizes[2]
    assert len({config.uds for config in each}) == count
    assert all(config.exit_with_parent for config in each)
    if count == 1:
        assert (each[0].rank, each[0].uds) == (None, "/run/up/worker.sock")
        assert replicas[0][0].name == "worker"
        return
    assert [config.rank for config in each] == list(range(ranks)) * sizes[2]
    assert [config.data_parallel_rank for config in each] == [n // ranks for n in range(count)]
    assert {config.local_world_size for config in each} == {count}
    names = [one.name for one in itertools.chain(*replicas)]
    assert names == [f"worker {number}" for number in range(count)]
    assert [f"unix:{config.uds}" for config in each] == [
        one.address for one in itertools.chain(*replicas)
    ]


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["4", "5", "6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"}, [f"GPU-{x}" for x in "abcd"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, ["4", "5", "", ""]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [None] * 4),
    ],
)
def test_each_sees_a_gpu_of_its_own(environ: dict[str, str], gpus: list[str | None]) -> None:
    replicas, _ = workers(*sized(2, 2, 1), environ=environ)
    assert [one.variables.get("CUDA_VISIBLE_DEVICES") for one in replicas[0]] == gpus


@pytest.mark.parametrize("flags", [("--simulate",), ("--device=cpu",)])
def test_who_needs_no_gpu_is_told_nothing_of_them(flags: tuple[str, ...]) -> None:
    replicas, _ = workers(*flags, *sized(2, 1, 2))
    assert all(not one.variables for one in itertools.chain(*replicas))


@pytest.mark.parametrize(
    "name", ["rank", "data-parallel-rank", "local-world-size", "rendezvous-port", "worker"]
)
def test_what_up_decides_is_no_flag_of_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workers(f"--{name}=1")
    assert "is set by `twinplane up` itself" in capsys.readouterr().err


def test_the_doctor_looks_at_the_first_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        doctor.checks, "check_worker", lambda options: asked.append(list(options)) or []
    )
    doctor.main(["--json", "--simulate", *sized(2, 2, 2)])
    doctor.main(["--json", "--simulate"])
    several, one = asked
    assert {"--rank=0", "--data-parallel-rank=0", "--local-world-size=8"} <= set(several)
    assert not [option for option in one if "rank" in option or "world" in option]

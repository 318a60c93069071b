"""The workers that `twinplane up` starts: one for each rank of each replica."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twinplane.cli import planes
from twinplane.settings.worker import WorkerConfig

_ONLY = "worker.sock"
_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class UpWorker:
    """One worker: what it is called, where it listens, its flags and its variables."""

    name: str
    address: str
    flags: argparse.Namespace
    variables: Mapping[str, str]


def worker_count(config: WorkerConfig) -> int:
    """How many workers there are: one for each rank of each replica."""
    return config.tensor_parallel_size * config.pipeline_parallel_size * config.data_parallel_size


def replicas_of(
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    config: WorkerConfig,
    folder: Path,
) -> list[list[UpWorker]]:
    """The workers of each replica, in the order of their ranks. Their sockets are in `folder`.

    Several workers share the cores of this machine, and each sees one of its GPUs.
    """
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    count = worker_count(config)
    if count == 1:
        return [[_worker("worker", folder / _ONLY, namespace, {})]]
    workers = [
        _worker(
            f"worker {number}",
            folder / f"worker{number}.sock",
            namespace,
            {} if config.device == "cpu" or config.simulate else _own_gpu(number, environ),
            rank=number % ranks,
            data_parallel_rank=number // ranks,
            local_world_size=count,
        )
        for number in range(count)
    ]
    return [workers[first : first + ranks] for first in range(0, count, ranks)]


def _worker(
    name: str,
    socket: Path,
    namespace: argparse.Namespace,
    variables: Mapping[str, str],
    **flags: object,
) -> UpWorker:
    own = planes.worker_flags(namespace, uds=str(socket), exit_with_parent=True, **flags)
    return UpWorker(name, f"unix:{socket}", own, variables)


def _own_gpu(number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Shows a worker one GPU, of those that this command may use."""
    given = [each for each in environ.get(_GPUS, "").split(",") if each]
    if not given:
        return {_GPUS: str(number)} if _GPUS not in environ else {}
    return {_GPUS: given[number]} if number < len(given) else {_GPUS: ""}

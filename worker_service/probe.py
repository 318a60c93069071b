"""`python -m worker_service.probe`: what a worker finds on this machine, as one JSON object.

For `twinplane doctor`, as a process of its own: it imports torch, compiles the CPU kernels unless
they are there, and may take long or die.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from worker_service.kernels.cpu.compiler import KernelsUnavailable, find_toolchain
from worker_service.threads import resolve_threads


@dataclass(frozen=True, slots=True)
class Report:
    """The answer. Of a thing and its error one is empty.

    `refusals`: for each way to compute the model why it can't run here, None when it can.
    """

    threads: int
    threads_source: str
    compiler: str
    compiler_error: str
    torch: str
    torch_error: str
    devices: tuple[str, ...]
    refusals: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class _Torch:
    """The part of a Report for which torch is needed."""

    version: str = ""
    error: str = ""
    devices: tuple[str, ...] = ()
    refusals: Mapping[str, str | None] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m worker_service.probe")
    parser.add_argument("--threads", type=int, help="the worker's setting")
    print(json.dumps(asdict(probe(parser.parse_args(argv).threads, os.environ))))
    return 0


def probe(threads_setting: int | None, environment: Mapping[str, str]) -> Report:
    """Looks at the threads, the compiler, torch and its devices, and each way to compute."""
    threads = resolve_threads(threads_setting)
    compiler, compiler_error = "", ""
    try:
        compiler = find_toolchain(environment).version
    except KernelsUnavailable as unavailable:
        compiler_error = str(unavailable)
    found = _probe_torch(threads.count)
    return Report(
        threads=threads.count,
        threads_source=threads.source,
        compiler=compiler,
        compiler_error=compiler_error,
        torch=found.version,
        torch_error=found.error,
        devices=found.devices,
        refusals=found.refusals,
    )


def _probe_torch(threads: int) -> _Torch:
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a library of its own is missing
        return _Torch(error=str(error))
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(gpu_count))
    return _Torch(
        version=torch.__version__,
        devices=("cpu", *gpus),
        refusals=_refusals("cuda" if gpu_count else "cpu", threads),
    )


def _refusals(device: str, threads: int) -> dict[str, str | None]:
    """What each pass says of a small model in the device's usual number format."""
    import torch

    from worker_service.attention.interface import AttentionConfig
    from worker_service.domain.capability import DataType, Limits
    from worker_service.runner.forward_pass import PassConfig
    from worker_service.runner.options import Quantization
    from worker_service.runner.selection import PASSES

    data_type = DataType.FLOAT32 if device == "cpu" else DataType.BFLOAT16
    attention = AttentionConfig(
        head_count=9,
        kv_head_count=3,
        head_dim=64,
        scale=0.125,
        layer_windows=(None,),
        block_size=16,
        max_length=1024,
        data_type=getattr(torch, data_type.value),
        device=torch.device(device),
    )
    config = PassConfig(
        attention=attention,
        limits=Limits(1, 1, 1024, 1024),
        quantization=Quantization.NONE,
        kv_data_type=data_type,
        thread_count=threads,
        progress=lambda line: None,
    )
    return {kind.name: kind.probe(config) for kind in PASSES}


if __name__ == "__main__":
    sys.exit(main())

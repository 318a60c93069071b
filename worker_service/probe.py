"""`python -m worker_service.probe`: what a worker finds on this machine, as one JSON object.

`twinplane doctor` runs it as a process of its own, because it imports torch, compiles the CPU
kernels unless they are there, and may take long or die.
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

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Report:
    """The answer. Of each pair of a thing and its error, one is empty.

    `refusals` says for each executor why it can't run here; None when it can.
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
    """Looks at the threads, the compiler, torch and its devices, and each executor."""
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
    """Why each executor refuses a small model in the device's usual number format, if it does."""
    import torch

    from worker_service.domain.capability import DataType, Limits
    from worker_service.model.registry import describe
    from worker_service.runner.executor import ExecutorConfig
    from worker_service.runner.options import Quantization
    from worker_service.runner.selection import EXECUTORS

    data_type = DataType.FLOAT32 if device == "cpu" else DataType.BFLOAT16
    config = ExecutorConfig(
        spec=describe(_MODEL),
        device=torch.device(device),
        data_type=getattr(torch, data_type.value),
        quantization=Quantization.NONE,
        kv_data_type=data_type,
        block_size=16,
        limits=Limits(1, 1, 1024, 1024),
        thread_count=threads,
        progress=lambda line: None,
    )
    return {str(kind): kind.probe(config) for kind in EXECUTORS}


if __name__ == "__main__":
    sys.exit(main())

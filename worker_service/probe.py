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
from pathlib import Path
from typing import TYPE_CHECKING

from worker_service.kernels.cpu.compiler import KernelsUnavailable, find_toolchain
from worker_service.load_errors import LoadError
from worker_service.threads import resolve_threads

if TYPE_CHECKING:
    from worker_service.model.spec import DecoderSpec

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
    """The answer. Of each pair of a thing and its error, one is empty; both are where no model was
    given to look at.

    `refusals` says for each executor why it can't run the model, or a small one, here; None when it
    can.
    """

    threads: int
    threads_source: str
    compiler: str
    compiler_error: str
    torch: str
    torch_error: str
    devices: tuple[str, ...]
    refusals: Mapping[str, str | None]
    model: str
    model_error: str


@dataclass(frozen=True, slots=True)
class _Torch:
    """The part of a Report for which torch is needed."""

    version: str = ""
    error: str = ""
    devices: tuple[str, ...] = ()
    refusals: Mapping[str, str | None] = field(default_factory=dict)
    model: str = ""
    model_error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m worker_service.probe")
    parser.add_argument("--threads", type=int, help="the worker's setting")
    parser.add_argument("--model", type=Path, help="a model folder that a worker would load")
    arguments = parser.parse_args(argv)
    print(json.dumps(asdict(probe(arguments.threads, os.environ, arguments.model))))
    return 0


def probe(
    threads_setting: int | None, environment: Mapping[str, str], model_folder: Path | None = None
) -> Report:
    """Looks at the threads, the compiler, torch and its devices, the model and each executor."""
    threads = resolve_threads(threads_setting)
    compiler, compiler_error = "", ""
    try:
        compiler = find_toolchain(environment).version
    except KernelsUnavailable as unavailable:
        compiler_error = str(unavailable)
    found = _probe_torch(threads.count, model_folder)
    return Report(
        threads=threads.count,
        threads_source=threads.source,
        compiler=compiler,
        compiler_error=compiler_error,
        torch=found.version,
        torch_error=found.error,
        devices=found.devices,
        refusals=found.refusals,
        model=found.model,
        model_error=found.model_error,
    )


def _probe_torch(threads: int, model_folder: Path | None) -> _Torch:
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a library of its own is missing
        return _Torch(error=str(error))
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(gpu_count))
    spec, model_error = (None, "") if model_folder is None else _describe(model_folder)
    model = ""
    if spec is not None:
        model = f"{spec.architecture}, {len(spec.layers)} layers, {spec.max_length} positions"
    return _Torch(
        version=torch.__version__,
        devices=("cpu", *gpus),
        refusals=_refusals("cuda" if gpu_count else "cpu", threads, spec),
        model=model,
        model_error=model_error,
    )


def _describe(folder: Path) -> tuple[DecoderSpec | None, str]:
    """The model in the folder, or why a worker would not load it. No weight is read."""
    from worker_service.model.accounting import account_for
    from worker_service.model.registry import describe
    from worker_service.weights.checkpoint import Checkpoint

    try:
        with Checkpoint(folder) as checkpoint:
            return account_for(checkpoint, describe(checkpoint.config)), ""
    except LoadError as error:
        return None, str(error)


def _refusals(device: str, threads: int, spec: DecoderSpec | None) -> dict[str, str | None]:
    """Why each executor refuses the model, or a small one, in the device's usual number format."""
    import torch

    from worker_service.domain.capability import DataType, Limits
    from worker_service.model.registry import describe
    from worker_service.runner.executor import ExecutorConfig
    from worker_service.runner.options import Quantization
    from worker_service.runner.selection import EXECUTORS

    data_type = DataType.FLOAT32 if device == "cpu" else DataType.BFLOAT16
    config = ExecutorConfig(
        spec=spec or describe(_MODEL),
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

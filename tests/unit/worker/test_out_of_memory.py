"""Memory that runs out: at a load one line with the plan and the flags, at a step another try."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from tests.support import runner_rig
from tests.support.runner_rig import build, options
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from tests.support.whole_stack import serving
from twinplane.settings.worker import WorkerConfig
from worker_service import startup
from worker_service.device_errors import is_out_of_memory, one_line
from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.load_errors import DeviceFailed, OutOfMemory
from worker_service.model.loader import WeightLoader
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.load import load_runner
from worker_service.runner.model_runner import ModelRunner
from worker_service.startup import StartupError, start_runner

# As each library words them.
ERRORS: dict[str, Callable[[], Exception]] = {
    "Python": MemoryError,
    "numpy": lambda: MemoryError("Unable to allocate 29.8 TiB for an array with shape (9, 9)"),
    "torch on a CPU": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 3221225472000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "torch on Windows": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried"),
    "torch on a GPU": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB of "
        "which 1 MiB is free.\nIncluding non-PyTorch memory, …"
    ),
    "kernels": lambda: MemoryError("no scratch memory for decode"),
    "mmap": lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
}
OTHERS = (
    ValueError("can't allocate memory"),
    RuntimeError("shape mismatch"),
    OSError(errno.ENOSPC, "No space left on device"),
    KeyError("memory"),
)


@pytest.mark.parametrize("name", ERRORS)
def test_each_library_is_understood(name: str) -> None:
    error = ERRORS[name]()
    assert is_out_of_memory(error)
    assert one_line(error) and "\n" not in one_line(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_others(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer and random weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("whole") / "model")
    config = {**TINY_CONFIG, "max_position_embeddings": 256, "vocab_size": 259}
    text = (folder / "config.json").read_text()
    save_random(tiny_spec(**{key: config[key] for key in config if key != "architectures"}), folder)
    (folder / "config.json").write_text(json.dumps({**json.loads(text), **config}))
    return folder


PLACES: dict[str, tuple[type, str]] = {
    "the pool": (KVCache, "clear_null_block"),
    "a projection": (WeightLoader, "projection"),
    "a tensor": (WeightLoader, "tensor"),
    "warming up": (ModelRunner, "warm_up"),
    "rows": (ModelRunner, "__init__"),
}


@pytest.mark.parametrize("executor", ["compiled", "torch"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ERRORS)
def test_a_load_says_the_plan_and_the_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str, executor: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ERRORS[name]()

    monkeypatch.setattr(*PLACES[place], fail)
    with pytest.raises(OutOfMemory) as refused:
        load_runner(options(folder, executor=executor))
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("this machine ran out of memory (")
    assert "; the plan was weights " in message
    for flag in ("--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens"):
        assert flag in message
    assert "--dtype bfloat16" in message


@pytest.mark.parametrize("place", PLACES)
def test_a_device_that_fails_at_a_load_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.AcceleratorError("CUDA error: no kernel image is available\nCompile with …")

    monkeypatch.setattr(*PLACES[place], fail)
    with pytest.raises(DeviceFailed, match=r"failed \(CUDA error: no kernel image .* --device cpu"):
        build(folder)


def test_what_is_no_lack_of_memory_stays_what_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(WeightLoader, "projection", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        build(folder)


def test_a_simulation_without_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ERRORS["numpy"]()

    monkeypatch.setattr(startup, "SimulatedRunner", fail)
    with pytest.raises(StartupError, match="give less by --simulate-block-count"):
        start_runner(WorkerConfig(simulate=True), lambda line: None)


# Steps.


class FailingExecutor:
    """Executor around another, whose run fails as `fails` says of the batch; half of what it should
    compute may be written by then."""

    def __init__(self, executor: Any, fails: Callable[[StepBatch], Exception | None]) -> None:
        self._executor = executor
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def run(self, batch: StepBatch, logit_indices: IntColumn) -> torch.Tensor:
        logits: torch.Tensor = self._executor.run(batch, logit_indices)
        if (error := self._fails(batch)) is not None:
            raise error
        return logits


def serve_failing(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[StepBatch], Exception | None]
) -> None:
    def build_failing(folder: Path) -> ModelRunner:
        runner = build(folder)
        runner._weights._executor = FailingExecutor(runner._weights.executor, fails)
        return runner

    monkeypatch.setattr(runner_rig, "build", build_failing)


TEXTS = ("one", "a second one", "and the third of them, which is longer")


@pytest.mark.parametrize("name", ["kernels", "torch on a GPU"])
async def test_a_step_without_memory_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whichever step of the stack it is: every stream is byte-identical. The stack checks at its
    end that nothing is held."""
    countdown = -1

    def fails(batch: StepBatch) -> Exception | None:
        nonlocal countdown
        countdown -= 1
        return ERRORS[name]() if countdown == 0 else None

    serve_failing(monkeypatch, fails)
    async with serving(folder) as stack:

        async def answers() -> list[tuple[int, ...]]:
            each = (stack.generate(text=text, **LENGTH) for text in TEXTS)
            return [answer.token_ids for answer in await asyncio.gather(*each)]

        expected = await answers()
        for step in range(1, 7):
            countdown = step
            assert await answers() == expected
            assert countdown <= 0, "no step failed"
        pool = await stack.worker.memory_pool()
        assert pool.used_block_count == 0


LENGTH: dict[str, Any] = {"stop": {"max_tokens": 8, "ignore_end_of_sequence": True}}


async def test_who_never_fits_ends_alone_and_is_told_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of so many tokens never has memory: that request ends, and no neighbour notices."""

    def fails(batch: StepBatch) -> Exception | None:
        return ERRORS["torch on a GPU"]() if batch.token_count > 80 else None

    serve_failing(monkeypatch, fails)
    async with serving(folder) as stack:
        expected = [(await stack.generate(text=text, **LENGTH)).token_ids for text in TEXTS]
        large = asyncio.create_task(stack.generate(text="x" * 120, **LENGTH))
        others = [
            (await stack.generate(text=text, **LENGTH)).token_ids for text in TEXTS for _ in "abc"
        ]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await large
        assert others == [tokens for tokens in expected for _ in "abc"]
    assert refused.value.code() is grpc.StatusCode.INTERNAL
    assert "out of memory (OutOfMemoryError); a worker with less" in str(refused.value.details())

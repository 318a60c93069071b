"""The memory plan: told before the weights are read, and true of what the load then takes."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import runner_rig
from tests.support.quick import examples
from tests.support.runner_rig import options
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from tests.unit.twinplane.tiny_gguf import TinyGguf
from twinplane import models
from twinplane.settings.worker import WorkerConfig
from worker_service import startup
from worker_service.domain.capability import DataType, Limits
from worker_service.host_memory import HostMemory, host_memory
from worker_service.kernels.cpu.compiler import default_cache
from worker_service.load_errors import KVPoolTooLarge, LoadError, OutOfMemory
from worker_service.model.registry import describe
from worker_service.runner import device as devices
from worker_service.runner import memory_plan
from worker_service.runner.load import check_load, load_runner, plan_memory
from worker_service.runner.memory_plan import Memory, MemoryPlan, bytes_of_rows, in_units
from worker_service.runner.model_runner import ModelRunner, _warm_up_batch
from worker_service.runner.options import Quantization
from worker_service.runner.request_state import RequestState
from worker_service.runner.selection import EXECUTORS
from worker_service.sampling.state import SamplingState
from worker_service.startup import check_start, start_runner
from worker_service.weights.checkpoint import Checkpoint

Config = dict[str, Any]
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"executor": "compiled"},
    "float32 in torch": {"executor": "torch"},
    "float32 in reference": {"executor": "torch", "attention_backend": "reference"},
    "bfloat16": {"data_type": DataType.BFLOAT16},
    "int8": {"quantization": Quantization.INT8},
    "bfloat16 KV": {"kv_data_type": DataType.BFLOAT16},
}


@st.composite
def configs(draw: st.DrawFn) -> Config:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((8, 16, 32)))
    architecture = draw(st.sampled_from(("LlamaForCausalLM", "Qwen2ForCausalLM")))
    return {
        "architectures": [architecture],
        "vocab_size": draw(st.integers(2, 300)),
        "hidden_size": kv_heads * group * head_dim,
        "intermediate_size": draw(st.integers(1, 200)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.sampled_from((64, 1000))),
        "tie_word_embeddings": draw(st.booleans()),
    }


def own_home(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """An empty cache of models, with the kernels that are built already."""
    kernels = default_cache(os.environ)
    assert kernels is not None
    home.mkdir()
    (home / kernels.name).symlink_to(kernels)
    monkeypatch.setenv("TWINPLANE_HOME", str(home))


def run_largest_step(runner: ModelRunner) -> None:
    """As many tokens and logits as the limits allow, in the null block."""
    limits = runner.capability().limits
    batch = _warm_up_batch(limits.max_step_token_count, 1)
    with torch.inference_mode():
        runner._weights.executor.run(batch, np.arange(limits.max_sequence_count, dtype=np.int32))


@given(config=configs(), name=st.sampled_from(sorted(FORMATS)), rows=st.sampled_from((1, 16)))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_load_takes_what_was_planned(
    tmp_path_factory: pytest.TempPathFactory, config: Config, name: str, rows: int
) -> None:
    folder = save_random(describe(config), tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(config))
    given_options = options(folder, max_sequence_count=rows, **FORMATS[name])
    planned = check_load(given_options).memory
    runner = load_runner(given_options)
    run_largest_step(runner)
    taken = runner.memory_pool()
    assert (planned.weights_bytes, planned.kv_bytes) == (taken.weights_bytes, taken.kv_bytes)
    # Beside what grows with the step there is some for each thread, and torch returns its own.
    kernels = 12 << 20 if runner.capability().executor == "compiled" else 0
    assert taken.workspace_bytes <= 1.3 * planned.workspace_bytes + kernels
    if kernels:
        assert planned.workspace_bytes <= 1.3 * taken.workspace_bytes


@pytest.mark.parametrize("flags", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_planned_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], tied: bool
) -> None:
    own_home(monkeypatch, tmp_path / "home")
    TinyGguf(tied=tied).write(tmp_path / "tiny.gguf")
    config = WorkerConfig(model=str(tmp_path / "tiny.gguf"), threads=1, **flags)
    with pytest.raises(models.NotConverted) as unconverted:
        models.resolve(config.model, convert=False)
    found = startup._runner_options(config, tmp_path, lambda line: None)
    planned = check_load(found, unconverted.value.config).memory
    assert in_units(planned.weights_bytes) in check_start(config).summary
    taken = start_runner(config, lambda line: None).memory_pool()
    assert (planned.weights_bytes, planned.kv_bytes) == (taken.weights_bytes, taken.kv_bytes)


@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("length", [2, 64, 65, 1000])
@pytest.mark.parametrize("block_size", [1, 16])
def test_rows_take_what_was_planned(rows: int, length: int, block_size: int) -> None:
    limits = Limits(rows, 512, length, length)
    state = RequestState(limits, 100, block_size, 50)
    drafts, sampling = state._accepted, SamplingState(rows)._parameters
    parts = (state, drafts, sampling)
    arrays = [
        value
        for part in parts
        for name in (getattr(part, "__slots__", None) or vars(part))
        if isinstance(value := getattr(part, name), np.ndarray)
    ]
    assert sum(array.nbytes for array in arrays) == bytes_of_rows(limits, block_size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = save_random(tiny_spec(), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


def only_has(monkeypatch: pytest.MonkeyPatch, total: int, free: int | None = None) -> None:
    """From here on the machine has so many bytes."""
    memory = HostMemory(total, total if free is None else free)
    monkeypatch.setattr(memory_plan, "host_memory", lambda: memory)


def test_one_line_says_the_plan_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    class Read(Exception):
        pass

    def read(self: Checkpoint, *given: object) -> str:
        raise Read

    monkeypatch.setattr(Checkpoint, "describe", read)
    with pytest.raises(Read):
        runner_rig.build(folder)
    (line,) = [record for record in caplog.records if record.msg == "memory plan"]
    told = line.__dict__["fields"]
    planned = check_load(options(folder)).memory
    for name in ("weights_bytes", "kv_bytes", "workspace_bytes", "rows_bytes"):
        assert told[name] == getattr(planned, name) > 0
    assert told["total_bytes"] == host_memory().total_bytes
    assert told["free_bytes"] > 0


def test_a_plan_that_exceeds_what_is_free_is_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host backs its KV pool as it fills: it serves, and says so."""
    only_has(monkeypatch, 1 << 33, free=1 << 20)
    runner_rig.build(folder)
    (line,) = [record for record in caplog.records if "memory plan" in record.msg]
    assert line.levelname == "WARNING"
    assert line.msg == "memory plan exceeds what is free"


@pytest.mark.parametrize(
    ("total", "changes", "error", "words"),
    [
        (
            9000,
            {},
            OutOfMemory,
            r"the weights in float32 take .* kB, .* more than this machine has: give "
            r"--dtype bfloat16, or give --quantization int8, or serve a smaller model",
        ),
        (
            5000,
            {"data_type": DataType.BFLOAT16},
            OutOfMemory,
            r"the weights in bfloat16 take .* has: serve a smaller model",
        ),
        (
            3000,
            {"quantization": Quantization.INT8},
            OutOfMemory,
            r"the weights in int8 take .* has: serve a smaller model",
        ),
        (
            1 << 23,
            {"kv_cache_bytes": 1 << 24},
            KVPoolTooLarge,
            "the KV pool takes .* more than this machine has: give less by --kv-cache-memory-bytes",
        ),
        (
            1 << 23,
            {"max_sequence_count": 10**6},
            OutOfMemory,
            "rows for that many sequences .* give less by --max-num-seqs or --max-model-len",
        ),
        (
            1 << 23,
            {"max_step_token_count": 10**6},
            OutOfMemory,
            "buffers of a step .* give less by --max-num-batched-tokens or --max-num-seqs",
        ),
    ],
)
def test_a_machine_that_is_too_small_is_told_before_anything_is_read(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    changes: dict[str, Any],
    error: type[LoadError],
    words: str,
) -> None:
    only_has(monkeypatch, total)
    monkeypatch.setattr(Checkpoint, "describe", lambda *given: pytest.fail("weights are read"))
    for attempt in (check_load, load_runner):
        with pytest.raises(error, match=words) as refused:
            attempt(options(folder, **changes))
        assert "\n" not in str(refused.value)


def test_a_gguf_file_that_does_not_fit_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_home(monkeypatch, tmp_path / "home")
    TinyGguf().write(tmp_path / "tiny.gguf")
    only_has(monkeypatch, 9000)
    config = WorkerConfig(model=str(tmp_path / "tiny.gguf"), threads=1)
    for attempt in (check_start, lambda config: start_runner(config, lambda line: None)):
        with pytest.raises(OutOfMemory, match="the weights in float32 take"):
            attempt(config)
    assert not list(tmp_path.glob("home/**/*.safetensors"))


# A GPU, by the numbers that torch would say of it.


def gpu_with(monkeypatch: pytest.MonkeyPatch, free: int) -> torch.device:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 10**12))
    return torch.device("cuda", 0)


def test_the_default_pool_is_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in the format that is served, whatever that of the files is."""
    gpu = gpu_with(monkeypatch, 5000)
    assert devices.default_kv_cache_bytes(gpu, DataType.BFLOAT16, 4000) == 850
    with pytest.raises(OutOfMemory) as refused:
        devices.default_kv_cache_bytes(gpu, DataType.FLOAT32, 5000)
    assert str(refused.value) == (
        "the weights in float32 take 5 kB and leave no room in the 5 kB that are free on cuda:0: "
        "stop what else uses it, give --dtype bfloat16, or serve a smaller model"
    )


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False), (10**9, True), (-3000, False)])
def test_a_gpu_has_to_have_all_free(
    monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    gpu = gpu_with(monkeypatch, 0)
    config = configured(gpu)
    taken = EXECUTORS[-1].memory(config)
    kv_bytes = 10_000
    gpu_with(monkeypatch, taken.weights_bytes + taken.workspace_bytes + kv_bytes + spare)
    plan = plan_memory(config, taken, kv_bytes)
    if fits:
        plan.require_room()
    else:
        with pytest.raises(OutOfMemory, match=r"more than the .* that are free on cuda:0"):
            plan.require_room()


def configured(device: torch.device) -> Any:
    from worker_service.runner.executor import ExecutorConfig

    return ExecutorConfig(
        spec=tiny_spec(),
        device=device,
        data_type=torch.bfloat16,
        quantization=Quantization.NONE,
        kv_data_type=DataType.BFLOAT16,
        block_size=16,
        limits=Limits(4, 8, 64, 64),
        thread_count=1,
        progress=lambda line: None,
    )


def test_the_plan_in_words() -> None:
    machine = Memory("this machine", 25_276_502_016, 22_963_376_128)
    plan = MemoryPlan(machine, machine, 538_060_032, 1_073_741_824, 45_000_000, 999, "float32")
    assert plan.describe() == (
        "weights 538 MB + KV 1.07 GB + workspace 45 MB + rows 999 bytes, with 23 GB free on this "
        "machine"
    )


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (999_499, "999 kB"),
     (999_500, "1 MB"), (16_060_522_496, "16.1 GB"), (10**21, "1000 EB"), (10**25, "10000000 EB")],
)  # fmt: skip
def test_sizes_in_words(size: int, words: str) -> None:
    assert in_units(size) == words

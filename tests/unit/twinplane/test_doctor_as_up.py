"""The doctor refuses exactly what a start would refuse, for the same reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.planes import ROOT, free_port, plane_environment
from tests.support.quick import examples
from tests.support.tiny_model import write_tiny_model
from tests.support.tiny_spec import TINY_CONFIG, save_random, tiny_spec
from tests.unit.twinplane.cli_process import PATIENCE
from twinplane.cli.doctor_checks import State, WorkerProbe, check_models, judge_worker
from twinplane.settings.worker import WorkerConfig
from worker_service.probe import probe
from worker_service.startup import start_runner

Options = Mapping[str, Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders by what is wrong with them."""
    root = tmp_path_factory.mktemp("models")
    good = save_random(tiny_spec(), root / "good")
    (good / "config.json").write_text(json.dumps(TINY_CONFIG))
    changes: Mapping[str, Options] = {
        "architecture": {"architectures": ["Qwen3ForCausalLM"]},
        "quantized": {"quantization_config": {"quant_method": "awq"}},
        "layers": {"num_hidden_layers": 1},
        "shape": {"intermediate_size": 25},
        "activation": {"hidden_act": "gelu"},
        "narrow": {"torch_dtype": "bfloat16"},
    }
    for name, change in changes.items():
        shutil.copytree(good, root / name)
        (root / name / "config.json").write_text(json.dumps({**TINY_CONFIG, **change}))
    shutil.copytree(good, root / "no weights")
    (root / "no weights" / "model.safetensors").unlink()
    shutil.copytree(good, root / "broken")
    (root / "broken" / "model.safetensors").write_bytes(b"no safetensors")
    (root / "empty").mkdir()
    return {path.name: path for path in (*root.iterdir(), root / "nowhere")}


def or_none(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


MODELS = st.sampled_from(
    ["good"] * 12
    + ["narrow", "architecture", "quantized", "layers", "shape", "activation"]
    + ["no weights", "broken", "empty", "nowhere"]
)
OPTIONS = st.fixed_dictionaries(
    {
        "device": st.sampled_from(("auto", "cpu", "cpu", "cuda")),
        "dtype": st.sampled_from(("auto", "float32", "bfloat16", "float16")),
        "quantization": st.sampled_from(("none", "none", "int8")),
        "kv_cache_dtype": st.sampled_from(("auto", "auto", "float32", "bfloat16")),
        "executor": st.sampled_from(("auto", "auto", "compiled", "torch")),
        "attention_backend": st.sampled_from(("auto", "auto", "torch", "reference", "flash")),
        "block_size": st.sampled_from((16, 1, 7, 64)),
        "kv_cache_memory_bytes": or_none(
            st.sampled_from((1, 1000, 100_000, 1 << 20, 100_000_000_000, 1 << 60))
        ),
        "max_model_len": or_none(st.sampled_from((2, 64, 65, 100_000))),
        "max_num_seqs": or_none(st.sampled_from((1, 8))),
        "simulate": st.sampled_from((False, False, False, True)),
        "simulate_block_count": st.sampled_from((65536, 2)),
    }
)


def start_refusal(config: WorkerConfig) -> str | None:
    try:
        start_runner(config, lambda line: None)
    except Exception as error:  # whatever it is, a worker ends of it
        return str(error)
    return None


def doctor_refusal(config: WorkerConfig) -> str | None:
    findings = check_models((config.model,), None if config.simulate else config.model)
    findings += judge_worker(WorkerProbe(**asdict(probe(config, os.environ))))
    failed = [finding.detail for finding in findings if finding.state is State.FAIL]
    return "; ".join(failed) or None


@given(model=MODELS, options=OPTIONS)
@example(model="good", options={"device": "cuda"})
@example(model="good", options={"attention_backend": "flash"})
@example(model="good", options={"kv_cache_memory_bytes": 1000})
@example(model="good", options={"max_model_len": 100_000})
@example(model="good", options={"quantization": "int8", "executor": "torch"})
@example(model="architecture", options={})
@example(model="good", options={"simulate": True, "max_model_len": 99, "simulate_block_count": 2})
@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_the_doctor_and_a_start_agree(
    models: Mapping[str, Path], model: str, options: Options
) -> None:
    config = WorkerConfig(model=str(models[model]), threads=1, **options)
    said, happened = doctor_refusal(config), start_refusal(config)
    assert (said is None) == (happened is None), (said, happened)
    if happened is not None:
        assert said is not None
        assert happened in said


def test_a_check_keeps_nothing(models: Mapping[str, Path]) -> None:
    """No torch thread count, no file and no tensor is left behind."""
    config = WorkerConfig(model=str(models["good"]), threads=1, executor="torch")
    before = torch.get_num_threads(), sorted(models["good"].iterdir())
    doctor_refusal(config)
    assert (torch.get_num_threads(), sorted(models["good"].iterdir())) == before


# The same with processes, as a user runs them.


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, chat template and random weights."""
    folder = write_tiny_model(tmp_path_factory.mktemp("whole") / "model")
    config = {**TINY_CONFIG, "max_position_embeddings": 2048, "vocab_size": 259}
    text = (folder / "config.json").read_text()
    save_random(tiny_spec(**{key: config[key] for key in config if key != "architectures"}), folder)
    (folder / "config.json").write_text(json.dumps({**json.loads(text), **config}))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), None),
        (("--kv-cache-memory-bytes=1000",), "a KV pool of 1000 bytes holds no sequence"),
        (("--uds=/no/such/folder/a.sock",), "there is no folder /no/such/folder"),
        (None, "tokenizer.json"),
    ],
    ids=("good", "no room", "no folder", "no tokenizer"),
)
def test_doctor_and_up_agree(
    whole_model: Path, tmp_path: Path, options: tuple[str, ...] | None, reason: str | None
) -> None:
    if options is None:
        shutil.copytree(whole_model, tmp_path / "model")
        (tmp_path / "model" / "tokenizer.json").unlink()
        options = (f"--model={tmp_path / 'model'}",)
    arguments = [
        f"--model={whole_model}",
        f"--port={free_port()}",
        "--metrics-port=none",
        "--executor=torch",
        "--kv-cache-memory-bytes=8MiB",
        *options,
    ]
    doctor = subprocess.run(
        [sys.executable, "-m", "twinplane.cli", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT, env=plane_environment(),
    )  # fmt: skip
    failures = [each for each in json.loads(doctor.stdout) if each["state"] == "fail"]
    first_line, log = run_up(arguments, tmp_path / "log")
    if reason is None:
        assert (failures, doctor.returncode) == ([], 0)
        assert first_line.startswith("ready: "), log
    else:
        assert any(reason in each["detail"] for each in failures), failures
        assert doctor.returncode == 1
        assert first_line == ""
        assert reason in log


def run_up(arguments: list[str], log: Path) -> tuple[str, str]:
    """The first line on standard output, and the log."""
    command = [sys.executable, "-m", "twinplane.cli", "up", *arguments]
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            cwd=ROOT,
            env=plane_environment(),
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        process.wait(PATIENCE)
    return line, log.read_text()

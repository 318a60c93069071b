"""Which forward pass serves: the order, refusals and their reasons, and life without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import runner_rig, tiny_llama
from worker_service.attention.interface import AttentionConfig
from worker_service.domain.capability import DataType, Feature, Limits
from worker_service.kernels.cpu.compiler import KernelsUnavailable
from worker_service.kernels.cpu.library import Context, InstructionSet
from worker_service.load_errors import BackendUnavailable
from worker_service.runner import compiled_pass
from worker_service.runner.forward_pass import PassConfig, PassType
from worker_service.runner.options import Quantization
from worker_service.runner.selection import PASSES, select_pass

ATTENTION = AttentionConfig(
    head_count=2,
    kv_head_count=1,
    head_dim=8,
    scale=0.3,
    layer_windows=(None,),
    block_size=4,
    max_length=64,
    data_type=torch.float32,
    device=torch.device("cpu"),
)
CONFIG = PassConfig(
    attention=ATTENTION,
    limits=Limits(2, 8, 64, 64),
    quantization=Quantization.NONE,
    kv_data_type=DataType.FLOAT32,
    thread_count=1,
    progress=lambda line: None,
)


def refusing(name: str, reason: str | None) -> PassType:
    return PassType(name, frozenset(), lambda config: reason, PASSES[-1].build)


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    fields = [record.__dict__.get("fields", {}) for record in caplog.records]
    return [each for each in fields if "refusal" in each]


def test_the_first_that_can_run_is_chosen_and_refusals_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    candidates = [refusing("fancy", "needs a moon rock"), refusing("plain", None), PASSES[-1]]
    assert select_pass(CONFIG, None, candidates).name == "plain"
    assert refusals(caplog) == [{"backend": "fancy", "refusal": "needs a moon rock"}]


def test_a_named_backend_is_the_only_one_considered() -> None:
    assert select_pass(CONFIG, "reference").name == "reference"
    candidates = [refusing("fancy", "needs a moon rock"), PASSES[-1]]
    with pytest.raises(BackendUnavailable, match="fancy: needs a moon rock"):
        select_pass(CONFIG, "fancy", candidates)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(BackendUnavailable, match="'flash'; there are: compiled, torch, reference"):
        select_pass(CONFIG, "flash")


def test_the_cpu_runs_the_compiled_kernels_by_default() -> None:
    chosen = select_pass(CONFIG, None)
    assert chosen.name == "compiled"
    assert chosen.features == {Feature.BATCH_INVARIANT}


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (replace(ATTENTION, data_type=torch.bfloat16), "float32, not in bfloat16"),
        (replace(ATTENTION, device=torch.device("meta")), "not for meta"),
        (replace(ATTENTION, head_dim=6), "head_dim 6"),
        (replace(ATTENTION, head_dim=512), "head_dim 512"),
    ],
)
def test_torch_serves_what_the_kernels_refuse(
    attention: AttentionConfig, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    data_type = DataType(str(attention.data_type).removeprefix("torch."))
    config = replace(CONFIG, attention=attention, kv_data_type=data_type)
    assert select_pass(config, None).name == "torch"
    (refusal,) = refusals(caplog)
    assert refusal["backend"] == "compiled"
    assert reason in refusal["refusal"]


@pytest.mark.parametrize("name", ["torch", "reference"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": Quantization.INT8}, "int8 weights need the compiled kernels"),
        ({"kv_data_type": DataType.BFLOAT16}, "bfloat16 KV under other weights"),
    ],
)
def test_what_only_the_kernels_can_do_is_refused_elsewhere(
    name: str, changes: dict[str, object], reason: str
) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert select_pass(config, None).name == "compiled"
    with pytest.raises(BackendUnavailable, match=reason):
        select_pass(config, name)


def test_a_build_of_the_kernels_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(cache: Path, progress: Callable[[str], None], environment: object) -> Path:
        progress("compiling with c++")
        raise KernelsUnavailable("it is a test")

    monkeypatch.setattr(compiled_pass, "ensure_library", build)
    with caplog.at_level("INFO"):
        assert select_pass(CONFIG, None).name == "torch"
    logged = [record.__dict__.get("fields", {}) for record in caplog.records]
    assert logged.count({"doing": "compiling with c++"}) == 1


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home"))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_serves_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path / "model")
    runner = runner_rig.build(folder)
    capability = runner.capability()
    assert capability.attention_backend == "torch"
    assert Feature.BATCH_INVARIANT not in capability.features
    (refusal,) = refusals(caplog)
    assert refusal["backend"] == "compiled"
    assert "/nonexistent/c++ does not run" in refusal["refusal"]
    assert runner_rig.generate(runner, [[1, 2, 3]], 2)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_int8_cannot_be_honoured(tmp_path: Path) -> None:
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path / "model")
    with pytest.raises(BackendUnavailable, match=r"/nonexistent.*int8 weights need"):
        runner_rig.build(folder, quantization=Quantization.INT8)


def test_torch_computes_on_the_threads_asked_for_only_where_it_computes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path / "model")
    opened: list[int] = []

    def open_context(path: Path, threads: int, instruction_set: InstructionSet | None) -> Context:
        opened.append(threads)
        return Context(path, threads, instruction_set)

    monkeypatch.setattr(compiled_pass, "Context", open_context)
    before = torch.get_num_threads()
    try:
        for backend, torch_threads in (("compiled", 1), ("torch", 3), ("compiled", 1)):
            runner_rig.build(folder, attention_backend=backend, thread_count=3)
            assert torch.get_num_threads() == torch_threads
    finally:
        torch.set_num_threads(before)
    assert opened[-1] == 3, "a later model gets as many threads as the first"

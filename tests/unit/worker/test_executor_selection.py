"""Which executor serves: the order, refusals and their reasons, and life without a compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.support import runner_rig, tiny_llama
from tests.support.tiny_spec import (
    tiny_spec,
    with_attention,
    with_feed_forward,
    with_head_norms,
    with_layers,
)
from worker_service.domain.capability import DataType, Feature, Limits
from worker_service.kernels.cpu.compiler import KernelsUnavailable
from worker_service.kernels.cpu.library import Context, InstructionSet
from worker_service.load_errors import ExecutorUnavailable
from worker_service.model.spec import (
    Activation,
    DecoderSpec,
    ExpertsSpec,
    NormKind,
    ProjectionSpec,
    TensorSpec,
)
from worker_service.model.traits import Trait, traits_of
from worker_service.runner import compiled_executor
from worker_service.runner.executor import ExecutorConfig, ExecutorType
from worker_service.runner.options import Quantization
from worker_service.runner.selection import EXECUTORS, select_executor

SPEC = tiny_spec()
CONFIG = ExecutorConfig(
    spec=SPEC,
    device=torch.device("cpu"),
    data_type=torch.float32,
    quantization=Quantization.NONE,
    kv_data_type=DataType.FLOAT32,
    block_size=4,
    limits=Limits(2, 8, 64, 64),
    thread_count=1,
    progress=lambda line: None,
)
COMPILED, TORCH, REFERENCE = EXECUTORS


def refusing(name: str, reason: str | None) -> ExecutorType:
    last = EXECUTORS[-1]
    return ExecutorType(
        name, None, frozenset(), lambda config: reason, last.load, last.memory, last.adapters
    )


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, str]]:
    fields = [record.__dict__.get("fields", {}) for record in caplog.records]
    return [each for each in fields if "refusal" in each]


def test_the_first_that_can_run_is_chosen_and_refusals_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    candidates = [refusing("fancy", "needs a moon rock"), refusing("plain", None), REFERENCE]
    assert select_executor(CONFIG, None, None, candidates).name == "plain"
    assert refusals(caplog) == [{"executor": "fancy", "refusal": "needs a moon rock"}]


def test_a_named_executor_is_the_only_one_considered() -> None:
    assert select_executor(CONFIG, "torch", None) is TORCH
    assert select_executor(CONFIG, "torch", "reference") is REFERENCE
    candidates = [refusing("fancy", "needs a moon rock"), REFERENCE]
    with pytest.raises(ExecutorUnavailable, match="fancy: needs a moon rock"):
        select_executor(CONFIG, "fancy", None, candidates)


def test_an_attention_backend_asks_for_an_executor_that_has_it() -> None:
    assert select_executor(CONFIG, None, "torch") is TORCH
    assert select_executor(CONFIG, None, "reference") is REFERENCE


@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("flash", None, "no executor 'flash'; there are: compiled, torch$"),
        (None, "flash", "no attention backend 'flash'; there are: torch, reference$"),
        (None, "compiled", "is an executor, not an attention backend: say --executor compiled"),
        ("compiled", "torch", "'compiled' has its own attention: leave --attention-backend away"),
    ],
)
def test_names_that_mean_nothing_say_which_do(
    name: str | None, backend: str | None, words: str
) -> None:
    with pytest.raises(ExecutorUnavailable, match=words):
        select_executor(CONFIG, name, backend)


def test_the_cpu_runs_the_compiled_kernels_by_default() -> None:
    chosen = select_executor(CONFIG, None, None)
    assert chosen is COMPILED
    assert chosen.features == {Feature.BATCH_INVARIANT}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            replace(CONFIG, data_type=torch.bfloat16, kv_data_type=DataType.BFLOAT16),
            "float32, not in bfloat16",
        ),
        (replace(CONFIG, device=torch.device("meta")), "not for meta"),
        (replace(CONFIG, spec=tiny_spec(head_dim=6)), "head_dim 6"),
        (replace(CONFIG, spec=tiny_spec(head_dim=512)), "head_dim 512"),
    ],
)
def test_torch_serves_what_the_kernels_refuse(
    config: ExecutorConfig, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert select_executor(config, None, None) is TORCH
    (refusal,) = refusals(caplog)
    assert refusal["executor"] == "compiled"
    assert reason in refusal["refusal"]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"quantization": Quantization.INT8}, "int8 weights need the compiled executor"),
        ({"kv_data_type": DataType.BFLOAT16}, "bfloat16 KV under other weights"),
    ],
)
def test_what_only_the_kernels_can_do_is_refused_elsewhere(
    backend: str, changes: dict[str, object], reason: str
) -> None:
    config = replace(CONFIG, **changes)  # type: ignore[arg-type]
    assert select_executor(config, None, None) is COMPILED
    with pytest.raises(ExecutorUnavailable, match=reason):
        select_executor(config, "torch", backend)


def in_last_layer(index: int) -> bool:
    return index == len(SPEC.layers) - 1


# One model for each trait that has it, and no other.
SPECIAL: dict[Trait, DecoderSpec] = {
    Trait.WINDOWS: with_attention(
        SPEC, lambda _, own: replace(own, heads=replace(own.heads, window=9))
    ),
    Trait.HEAD_NORMS: with_head_norms(SPEC),
    Trait.SCORE_CAP: with_attention(SPEC, lambda _, own: replace(own, score_cap=50.0)),
    Trait.MIXED_HEADS: with_attention(
        SPEC,
        lambda i, own: replace(own, heads=replace(own.heads, kv_head_count=1 + in_last_layer(i))),
    ),
    Trait.MIXED_WIDTHS: with_feed_forward(
        SPEC, lambda i, own: replace(own, intermediate_size=24 + 8 * in_last_layer(i))
    ),
    Trait.NO_ROPE: with_attention(SPEC, lambda _, own: replace(own, rope=None)),
    Trait.PARTIAL_ROPE: with_attention(
        SPEC, lambda _, own: replace(own, rope=own.rope and replace(own.rope, rotary_dim=4))
    ),
    Trait.MIXED_ROPE: with_attention(
        SPEC,
        lambda i, own: replace(
            own, rope=own.rope and replace(own.rope, theta=1e4 * (1 + in_last_layer(i)))
        ),
    ),
    Trait.LAYER_NORM: replace(SPEC, final_norm=replace(SPEC.final_norm, kind=NormKind.LAYER)),
    Trait.NORM_OFFSET: replace(SPEC, final_norm=replace(SPEC.final_norm, weight_offset=1.0)),
    Trait.NORM_BIAS: replace(
        SPEC, final_norm=replace(SPEC.final_norm, bias=TensorSpec("model.norm.bias", (16,)))
    ),
    Trait.MIXED_EPSILON: replace(SPEC, final_norm=replace(SPEC.final_norm, epsilon=1e-5)),
    Trait.NO_PRE_NORM: with_feed_forward(SPEC, lambda _, own: replace(own, pre_norm=None)),
    Trait.POST_NORM: with_feed_forward(
        with_attention(SPEC, lambda _, own: replace(own, post_norm=own.pre_norm)),
        lambda _, own: replace(own, post_norm=own.pre_norm),
    ),
    Trait.GELU: with_feed_forward(SPEC, lambda _, own: replace(own, activation=Activation.GELU)),
    Trait.GELU_TANH: with_feed_forward(
        SPEC, lambda _, own: replace(own, activation=Activation.GELU_TANH)
    ),
    Trait.UNGATED: with_feed_forward(SPEC, lambda _, own: replace(own, gated=False)),
    Trait.EXPERTS: with_feed_forward(
        SPEC, lambda _, own: replace(own, experts=ExpertsSpec(8, 2, 1))
    ),
    Trait.PARALLEL_BLOCKS: with_layers(SPEC, lambda _, own: replace(own, parallel=True)),
    Trait.RESIDUAL_SCALE: with_layers(SPEC, lambda _, own: replace(own, residual_scale=0.5)),
    Trait.EMBEDDING_SCALE: replace(SPEC, embedding_scale=4.0),
    Trait.LOGIT_SCALE: replace(SPEC, logit_scale=0.5),
    Trait.LOGIT_CAP: replace(SPEC, logit_cap=30.0),
    Trait.HEAD_BIAS: replace(
        SPEC,
        head=ProjectionSpec(
            (TensorSpec("lm_head.weight", (32, 16)),), (TensorSpec("lm_head.bias", (32,)),)
        ),
    ),
}
RUN_BY_COMPILED = {Trait.WINDOWS, Trait.HEAD_NORMS, Trait.PARTIAL_ROPE}
RUN_BY_TORCH = {*RUN_BY_COMPILED, Trait.MIXED_HEADS, Trait.MIXED_WIDTHS, Trait.MIXED_EPSILON}


@pytest.mark.parametrize("trait", Trait)
def test_an_executor_refuses_by_name_what_it_does_not_run(trait: Trait) -> None:
    config = replace(CONFIG, spec=SPECIAL[trait])
    assert traits_of(config.spec) == {trait}
    for kind, supported in (
        (COMPILED, RUN_BY_COMPILED),
        (TORCH, RUN_BY_TORCH),
        (REFERENCE, RUN_BY_TORCH),
    ):
        reason = None if trait in supported else f"the model has {trait.value}"
        assert kind.probe(config) == reason


def optional_fields(value: object) -> Iterator[tuple[type, str, bool]]:
    """Each field with a default in a spec and its parts, and whether it has another value."""
    if isinstance(value, tuple):
        for item in value:
            yield from optional_fields(item)
    elif is_dataclass(value):
        for field in fields(value):
            own = getattr(value, field.name)
            if field.default is not MISSING:
                yield type(value), field.name, own != field.default
            yield from optional_fields(own)


def test_every_option_of_a_spec_has_a_trait() -> None:
    """What a spec can say beyond the plainest decoder cannot be overlooked by an executor."""
    found = {option for spec in SPECIAL.values() for option in optional_fields(spec)}
    used = {(kind, name) for kind, name, is_used in found if is_used}
    unused = {(kind, name) for kind, name, _ in found} - used
    assert unused == {(DecoderSpec, "tied_head"), (TensorSpec, "cut")}  # not what is computed


def test_a_refusal_names_everything_that_is_lacking() -> None:
    spec = replace(SPECIAL[Trait.EXPERTS], logit_cap=30.0)
    with pytest.raises(
        ExecutorUnavailable, match="compiled: the model has a mixture of experts, capped logits;"
    ):
        select_executor(replace(CONFIG, spec=spec), None, None)


def test_a_build_of_the_kernels_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def build(cache: Path, progress: Callable[[str], None], environment: object) -> Path:
        progress("compiling with c++")
        raise KernelsUnavailable("it is a test")

    monkeypatch.setattr(compiled_executor, "ensure_library", build)
    with caplog.at_level("INFO"):
        assert select_executor(CONFIG, None, None) is TORCH
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
    assert (capability.executor, capability.attention_backend) == ("torch", "torch")
    assert Feature.BATCH_INVARIANT not in capability.features
    (refusal,) = refusals(caplog)
    assert refusal["executor"] == "compiled"
    assert "/nonexistent/c++ does not run" in refusal["refusal"]
    assert runner_rig.generate(runner, [[1, 2, 3]], 2)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_int8_cannot_be_honoured(tmp_path: Path) -> None:
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path / "model")
    with pytest.raises(ExecutorUnavailable, match=r"/nonexistent.*int8 weights need"):
        runner_rig.build(folder, quantization=Quantization.INT8)


def test_torch_computes_on_the_threads_asked_for_only_where_it_computes_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_llama.save(tiny_llama.llama(), tmp_path / "model")
    opened: list[int] = []

    def open_context(path: Path, threads: int, instruction_set: InstructionSet | None) -> Context:
        opened.append(threads)
        return Context(path, threads, instruction_set)

    monkeypatch.setattr(compiled_executor, "Context", open_context)
    before = torch.get_num_threads()
    try:
        for executor, torch_threads in (("compiled", 1), ("torch", 3), ("compiled", 1)):
            runner_rig.build(folder, executor=executor, thread_count=3)
            assert torch.get_num_threads() == torch_threads
    finally:
        torch.set_num_threads(before)
    assert opened[-1] == 3, "a later model gets as many threads as the first"

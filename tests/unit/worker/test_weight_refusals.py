"""Updates that do not fit are refused with the reason: nothing has changed, and memory is back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.refused_updates import (
    Change,
    Served,
    Tensors,
    assert_refused,
    copied,
    note_receivers,
    put,
    serve,
    without,
)
from tests.support.runner_rig import generate
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import (
    build,
    chunks,
    described,
    from_disk,
    prepare,
    streamed,
    tensors_in,
    two_models,
)
from worker_service.domain.errors import MemoryLacking, SourceLost, UpdateInvalid, WorkerError
from worker_service.domain.weights import (
    Placement,
    StreamSource,
    Target,
    TensorChunk,
    WeightsUpdate,
)
from worker_service.runner.interface import PreparationCancelled
from worker_service.runner.memory_plan import Memory

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(autouse=True)
def noted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    note_receivers(served, monkeypatch)


def test_what_is_refused_leaves_the_tokens_as_they_are(served: Served) -> None:
    before = generate(served.runner, PROMPTS, 6)
    broken = served.tensors | {NORM: torch.full((48,), float("nan"))}
    for placement in (Placement.BESIDE, Placement.IN_PLACE):
        update = streamed(broken, placement=placement)
        assert_refused(served, update, chunks(broken), UpdateInvalid, "holds NaN")
    assert generate(served.runner, PROMPTS, 6) == before


# --- descriptions ---------------------------------------------------------------------------------

DESCRIPTIONS: dict[str, tuple[Change, str]] = {
    "missing norm": (without(NORM), f"tensors: lacks the tensor {NORM}"),
    "missing head": (without("lm_head.weight"), "lacks the tensor lm_head.weight"),
    "missing embedding": (without(EMBEDDING), f"lacks the tensor {EMBEDDING}"),
    "missing many": (lambda tensors: [tensors.pop(each) for each in sorted(tensors)[:9]], "9|more"),
    "extra": (put("model.extra", torch.zeros(3)), r"name: the model has no tensor 'model.extra'"),
    "another layer": (
        put("model.layers.3.mlp.up_proj.weight", torch.zeros(80, 48)),
        "no tensor 'model.layers.3",
    ),
    "empty name": (put("", torch.zeros(3)), "no tensor ''"),
    "long name": (put("x" * 9999, torch.zeros(3)), "no tensor 'x{200}'"),
    "transposed": (
        put(QUERY, torch.zeros(48, 48)[:, :40]),
        r"shape: .* has \[48, 40\].*\[48, 48\]",
    ),
    "flat": (put(QUERY, torch.zeros(48 * 48)), r"\[2304\], the model's \[48, 48\]"),
    "one dimension more": (put(NORM, torch.zeros(1, 48)), r"\[1, 48\], the model's \[48\]"),
    "no dimension": (put(NORM, torch.zeros(())), r"\[\], the model's \[48\]"),
    "empty": (put(NORM, torch.zeros(0)), r"\[0\], the model's \[48\]"),
    "one row less": (put(EMBEDDING, torch.zeros(130, 48)), r"\[130, 48\], the model's \[131, 48\]"),
}


@pytest.mark.parametrize("name", DESCRIPTIONS)
@pytest.mark.parametrize("placement", Placement, ids=lambda each: each.name)
def test_a_description_that_does_not_fit(served: Served, name: str, placement: Placement) -> None:
    change, words = DESCRIPTIONS[name]
    tensors = dict(served.tensors)
    change(tensors)
    update = streamed(tensors, placement=placement)
    assert_refused(served, update, iter(()), UpdateInvalid, words)


@pytest.mark.parametrize("number_format", ["I8", "I64", "F8_E4M3", "BOOL", "U8", "", "F32 "])
def test_a_format_that_is_not_read(served: Served, number_format: str) -> None:
    (one, *others) = described(served.tensors)
    update = WeightsUpdate("u", StreamSource((replace(one, number_format=number_format), *others)))
    assert_refused(served, update, iter(()), UpdateInvalid, r"tensors\[0\]\.data_type: of ")


def test_a_tensor_that_comes_twice(served: Served) -> None:
    tensors = described(served.tensors)
    update = WeightsUpdate("u", StreamSource((*tensors, tensors[3])))
    words = rf"tensors\[{len(tensors)}\]\.name: the tensor {tensors[3].name} comes twice"
    assert_refused(served, update, iter(()), UpdateInvalid, words)


def test_a_partial_update_of_nothing(served: Served) -> None:
    update = WeightsUpdate("u", StreamSource(()), is_partial=True)
    assert_refused(served, update, iter(()), UpdateInvalid, "none of the model's tensors")


@pytest.mark.parametrize("source", ["stream", "disk"])
def test_a_draft_model_that_is_not_there(served: Served, source: str) -> None:
    update = from_disk(served.new) if source == "disk" else streamed(served.tensors)
    update = replace(update, target=Target.DRAFT)
    assert_refused(served, update, iter(()), UpdateInvalid, "update.target: .* no draft model")


@pytest.mark.parametrize("source", ["stream", "disk"])
def test_another_digest_than_expected(served: Served, source: str) -> None:
    update = from_disk(served.new) if source == "disk" else streamed(served.tensors)
    given = iter(()) if source == "disk" else chunks(served.tensors)
    update = replace(update, expected_digest="0" * 64)
    error = assert_refused(served, update, given, UpdateInvalid, "expected_digest: the weights")
    digest = str(error).rpartition(" ")[2]
    prepare(served.runner, replace(from_disk(served.new), expected_digest=digest)).drop()


# --- chunks ---------------------------------------------------------------------------------------

Parts = list[TensorChunk]
CHUNKS: dict[str, tuple[Callable[[Parts], Parts], type[WorkerError], str]] = {
    "nothing": (lambda parts: [], SourceLost, "ended at byte 0 .*more were to come"),
    "the last is missing": (lambda parts: parts[:-1], SourceLost, "stream ended at byte"),
    "half": (lambda parts: parts[: len(parts) // 2], SourceLost, "stream ended at byte"),
    "the first is missing": (lambda parts: parts[1:], UpdateInvalid, r"chunk\.offset: 1000 came"),
    "one twice": (lambda parts: [parts[0], *parts], UpdateInvalid, r"chunk\.offset: 0 came where"),
    "two swapped": (
        lambda parts: [parts[1], parts[0], *parts[2:]],
        UpdateInvalid,
        r"chunk\.offset: 1000 came where 0",
    ),
    "reversed": (
        lambda parts: parts[::-1],
        UpdateInvalid,
        r"chunk\.tensor_index: \d+ came where 0",
    ),
    "one too many": (
        lambda parts: [*parts, parts[-1]],
        UpdateInvalid,
        "tensor_index: every tensor is whole already",
    ),
    "empty": (
        lambda parts: [replace(parts[0], data=b""), *parts],
        UpdateInvalid,
        r"chunk\.data: is empty",
    ),
    "beyond the end": (
        lambda parts: [replace(parts[0], data=bytes(10_000_000))],
        UpdateInvalid,
        r"chunk\.data: reaches to byte 10000000 of the tensor",
    ),
    "far tensor": (
        lambda parts: [replace(parts[0], tensor_index=2**31)],
        UpdateInvalid,
        "2147483648 came where 0 is next",
    ),
    "far offset": (
        lambda parts: [replace(parts[0], offset=2**63)],
        UpdateInvalid,
        "9223372036854775808 came where 0 is next",
    ),
    "one bit": (
        lambda parts: [*parts[:-1], replace(parts[-1], data=flipped(parts[-1].data))],
        UpdateInvalid,
        r"tensors\[\d+\]\.sha256: the bytes of the tensor .* have the SHA-256",
    ),
    "one bit at the start": (
        lambda parts: [replace(parts[0], data=flipped(parts[0].data)), *parts[1:]],
        UpdateInvalid,
        r"tensors\[0\]\.sha256",
    ),
}


def flipped(data: bytes) -> bytes:
    return bytes((data[0] ^ 1,)) + data[1:]


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_chunks_that_are_not_the_next(served: Served, name: str, placement: Placement) -> None:
    change, kind, words = CHUNKS[name]
    update = streamed(served.tensors, placement=placement)
    given = iter(change(list(chunks(served.tensors, 1000))))
    assert_refused(served, update, given, kind, words)


def test_files_have_no_chunks(served: Served) -> None:
    update = from_disk(served.new)
    assert_refused(served, update, chunks(served.tensors), UpdateInvalid, "only weights from a str")


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["stream", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", [NORM, EMBEDDING, QUERY, "lm_head.weight"])
def test_numbers_that_are_none(
    served: Served, name: str, dtype: torch.dtype, source: str, tmp_path: Path
) -> None:
    broken = dict(served.tensors)
    broken[name] = broken[name].to(dtype, copy=True)
    broken[name].view(-1)[-1] = float("nan")
    refuse_numbers(served, broken, source, f"the tensor {name} holds NaN")


@pytest.mark.parametrize("source", ["stream", "disk"])
@pytest.mark.parametrize("value", [1e300, -1e39])
def test_numbers_that_become_infinite(served: Served, value: float, source: str) -> None:
    broken = dict(served.tensors)
    broken[NORM] = broken[NORM].double()
    broken[NORM][7] = value
    refuse_numbers(served, broken, source, f"the tensor {NORM} holds numbers that are too large")


def refuse_numbers(served: Served, broken: Tensors, source: str, words: str) -> None:
    """Whichever way they come, and wherever they would wait."""
    for placement in (Placement.BESIDE, Placement.IN_PLACE):
        if source == "stream":
            update, given = streamed(broken, placement=placement), chunks(broken)
        else:
            folder = copied(served, "numbers")
            save_file(broken, folder / "model.safetensors", {"format": "pt"})
            update, given = from_disk(folder, placement=placement), iter(())
        assert_refused(served, update, given, UpdateInvalid, words)


# --- memory, cancelling, and one update's failure -------------------------------------------------


def with_memory(served: Served, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    store = served.runner._weights
    memory = Memory("this machine", 10**12, free_bytes)
    monkeypatch.setattr(store, "recipe", replace(store.recipe, memory=lambda: (memory, memory)))


def test_what_does_not_fit_is_refused_with_the_sizes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = served.runner._weights.recipe
    kept = sum(each.nbytes for each in served.tensors.values())
    with_memory(served, monkeypatch, recipe.loaded_bytes + kept - 1)
    beside = streamed(served.tensors, placement=Placement.BESIDE)
    words = r"weights takes \d+ kB, .*steps \d.* and the tensors as they come \d+ kB: 1 bytes more"
    assert_refused(served, beside, iter(()), MemoryLacking, words)
    update = streamed(served.tensors)
    prepared = prepare(served.runner, update, served.tensors)
    assert prepared.facts.placement is Placement.IN_PLACE
    prepared.drop()
    with_memory(served, monkeypatch, recipe.loaded_bytes + kept)
    prepared = prepare(served.runner, update, served.tensors)
    assert prepared.facts.placement is Placement.BESIDE
    assert prepared.facts.host_bytes == kept
    assert served.runner.memory_pool().prepared_bytes == prepared.facts.device_bytes > 0
    prepared.drop()
    with_memory(served, monkeypatch, kept - 1)
    for placement in Placement:
        update = streamed(served.tensors, placement=placement)
        assert_refused(served, update, iter(()), MemoryLacking, r"tensors take \d+ kB as they come")


@pytest.mark.parametrize("at", range(0, 60, 4))
@pytest.mark.parametrize("source", ["stream", "disk"])
def test_what_nobody_wants_any_more_ends_soon(served: Served, at: int, source: str) -> None:
    """Cancelled after so many pieces of work."""
    asked = iter(range(1000))
    update = streamed(served.tensors) if source == "stream" else from_disk(served.new)
    made = None
    try:
        made = served.runner.begin_update(update, lambda: next(asked) >= at)
        for chunk in chunks(served.tensors) if source == "stream" else ():
            made.put(chunk)
        made.finish()
    except PreparationCancelled:
        pass
    finally:
        if made is not None:
            made.close()
    del made
    assert not served.made
    assert served.runner.memory_pool().prepared_bytes == 0


@pytest.mark.parametrize("error", [MemoryError("no"), RuntimeError("can't allocate memory: 9")])
def test_memory_that_runs_out_meanwhile(
    served: Served, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = served.runner._weights

    def load(*given: Any) -> Any:
        raise error

    failing = replace(store.recipe.executor, load=load)
    monkeypatch.setattr(store, "recipe", replace(store.recipe, executor=failing))
    update = streamed(served.tensors, placement=Placement.BESIDE)
    assert_refused(served, update, chunks(served.tensors), MemoryLacking, "ran out of memory")


def test_files_that_changed_since_are_not_taken_for_the_live_ones(tmp_path: Path) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, executor="torch")
    some = {NORM: tensors_in(new)[NORM]}
    save_file(tensors_in(new), old / "model.safetensors", {"format": "pt"})
    with pytest.raises(UpdateInvalid, match="files are others than those that were loaded"):
        prepare(runner, streamed(some, is_partial=True), some)

"""Shared memory and broadcasts that are not what the update says are refused with the reason."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.quick import spread
from tests.support.refused_updates import Served, assert_refused, note_receivers, serve
from tests.support.shared_weights import Trainer, shared, update_from
from tests.support.weight_updates import chunks, described
from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import (
    CudaMemory,
    GroupBackend,
    IpcSource,
    Placement,
    PosixMemory,
    TensorDescription,
)
from worker_service.weights.sources import posix_memory
from worker_service.weights.sources.posix_memory import PosixReader

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(autouse=True)
def noted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    note_receivers(served, monkeypatch)


def moved(source: IpcSource, index: int, offset: int) -> IpcSource:
    offsets = list(source.offsets)
    offsets[index] = offset
    return replace(source, offsets=tuple(offsets))


LAYOUTS: dict[str, tuple[Callable[[IpcSource], IpcSource], str]] = {
    "not aligned": (lambda source: moved(source, 1, source.offsets[1] + 2), r"offset: .*multiple"),
    "odd": (lambda source: moved(source, 0, 1), r"tensors\[0\]\.offset: 1 of .*4 bytes"),
    "over another": (lambda source: moved(source, 1, source.offsets[0]), "is over"),
    "over a part": (lambda source: moved(source, 1, source.offsets[1] - 4), "is over"),
    "beyond the end": (lambda source: moved(source, 0, source.byte_count), "would end at byte"),
    "past the end": (
        lambda source: moved(source, -1, source.offsets[-1] + 4),
        "would end at byte",
    ),
    "far": (lambda source: moved(source, 0, (1 << 64) - 4), "would end at byte"),
    "no bytes": (lambda source: replace(source, byte_count=0), "would end at byte"),
    "fewer bytes": (lambda source: replace(source, byte_count=source.byte_count - 4), "would end"),
    "more bytes": (
        lambda source: replace(source, byte_count=source.byte_count + 5000),
        r"byte_count: '/.*' has \d+ bytes, not",
    ),
    "a byte more": (
        lambda source: replace(source, byte_count=source.byte_count + 1),
        r"byte_count: '/.*' has",
    ),
    "huge": (lambda source: replace(source, byte_count=1 << 63), r"byte_count: '/.*' has"),
    "another name": (
        lambda source: replace(source, memory=PosixMemory("/not-there")),
        r"posix\.name: '/not-there' can't be opened: No such file",
    ),
    "the folder": (
        lambda source: replace(source, memory=PosixMemory("/.")),
        r"posix\.name: '/\.' is no shared memory",
    ),
    "a long name": (
        lambda source: replace(source, memory=PosixMemory("/" + "x" * 300)),
        r"posix\.name: .* can't be opened: File name too long",
    ),
    "a GPU's memory": (
        lambda source: replace(source, memory=CudaMemory(bytes(64), "GPU-1")),
        r"update\.ipc\.cuda: this worker computes on cpu",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_memory_that_is_not_what_was_said(served: Served, name: str, placement: Placement) -> None:
    change, words = LAYOUTS[name]
    with shared(served.tensors) as source:
        update = update_from(change(source), placement=placement)
        assert_refused(served, update, iter(()), UpdateInvalid, words)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_memory(served: Served, kind: str, tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"no-memory-{os.getpid()}"
    target = tmp_path / "file"
    target.write_bytes(bytes(1000))
    match kind:
        case "link":
            path.symlink_to(target)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    try:
        with shared(served.tensors) as source:
            update = update_from(replace(source, memory=PosixMemory(f"/{path.name}")))
            words = "can't be opened" if kind == "link" else "is no shared memory"
            assert_refused(served, update, iter(()), UpdateInvalid, words)
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


def test_memory_that_shrinks_meanwhile(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is mapped would end the worker here."""
    read = PosixReader.read

    def shrinking(reader: PosixReader, *given: object) -> None:
        os.truncate(posix_memory._FOLDER / reader._name[1:], 4096)
        read(reader, *given)  # type: ignore[arg-type]

    with shared(served.tensors) as source:
        monkeypatch.setattr(PosixReader, "read", shrinking)
        assert_refused(served, update_from(source), iter(()), SourceLost, "ended at byte")


def test_memory_stays_its_owners(served: Served) -> None:
    with shared(served.tensors) as source:
        assert isinstance(source.memory, PosixMemory)
        path = Path("/dev/shm") / source.memory.name[1:]
        before = path.read_bytes()
        preparation = served.runner.begin_update(update_from(source), lambda: False)
        preparation.finish().drop()
        assert path.read_bytes() == before


def test_a_worker_on_a_cpu_talks_no_nccl(served: Served) -> None:
    source = Trainer().source(served.tensors, backend=GroupBackend.NCCL)
    words = r"update\.distributed\.backend: NCCL needs a GPU"
    assert_refused(served, update_from(source), iter(()), UpdateInvalid, words)


# --- descriptions, by both ways -------------------------------------------------------------------


def broken(
    tensors: tuple[TensorDescription, ...], seed: int
) -> tuple[tuple[TensorDescription, ...], str]:
    """One thing wrong, and what is said of it."""
    drawn = random.Random(seed)
    index = drawn.randrange(len(tensors))
    tensor = tensors[index]
    parts = list(tensors)
    match seed % 6:
        case 0:
            parts[index] = replace(tensor, name=tensor.name + drawn.choice("x._"))
            return tuple(parts), rf"\[{index}\](\.tensor)?\.name: the model has no tensor"
        case 1:
            parts[index] = replace(tensor, shape=(*tensor.shape, 1))
            return tuple(parts), rf"\[{index}\](\.tensor)?\.shape: "
        case 2:
            parts[index] = replace(tensor, shape=(tensor.shape[0] + 1, *tensor.shape[1:]))
            return tuple(parts), rf"\[{index}\](\.tensor)?\.shape: "
        case 3:
            parts[index] = replace(tensor, number_format=drawn.choice(["I8", "F8_E4M3", "U8"]))
            return tuple(parts), rf"\[{index}\](\.tensor)?\.data_type: "
        case 4:
            other = (index + 1) % len(parts)
            parts[max(index, other)] = parts[min(index, other)]
            return tuple(parts), r".*\.name: the tensor .* comes twice"
        case _:
            parts[index] = replace(tensor, sha256=drawn.randbytes(32))
            return tuple(parts), rf"\[{index}\](\.tensor)?\.sha256: the bytes of the tensor"


@pytest.mark.parametrize("seed", spread(range(60), 24))
@pytest.mark.parametrize("way", ["memory", "group"])
def test_a_description_that_is_wrong(served: Served, trainer: Trainer, seed: int, way: str) -> None:
    wrong, words = broken(described(served.tensors), seed)
    if way == "memory":
        with shared(served.tensors) as source:
            update = update_from(replace(source, tensors=wrong))
            assert_refused(served, update, iter(()), UpdateInvalid, rf"ipc\.tensors{words}")
        return
    group = trainer.source(served.tensors)
    if seed % 6 == 5:  # all else is refused before the group is joined
        trainer.start(group, served.tensors)
    update = update_from(replace(group, tensors=wrong))
    assert_refused(served, update, iter(()), UpdateInvalid, rf"distributed\.tensors{words}")


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.mark.parametrize("way", ["memory", "group"])
@pytest.mark.parametrize("value", [float("nan"), 1e300])
def test_numbers_that_are_none(served: Served, trainer: Trainer, value: float, way: str) -> None:
    tensors = dict(served.tensors)
    tensors[NORM] = tensors[NORM].double()
    tensors[NORM][5] = value
    words = f"the tensor {NORM} holds"
    if way == "memory":
        with shared(tensors) as source:
            assert_refused(served, update_from(source), iter(()), UpdateInvalid, words)
        return
    group = trainer.source(tensors, bucket_bytes=9999)
    trainer.start(group, tensors)
    assert_refused(served, update_from(group), iter(()), UpdateInvalid, words)


def test_chunks_beside(served: Served, trainer: Trainer) -> None:
    words = "only weights from a stream"
    with shared(served.tensors) as source:
        given = chunks(served.tensors)
        assert_refused(served, update_from(source), given, UpdateInvalid, words)
    group = trainer.source(served.tensors)
    assert_refused(served, update_from(group), chunks(served.tensors), UpdateInvalid, words)


def test_missing_and_partial(served: Served) -> None:
    some = {NORM: torch.ones(48)}
    with shared(some) as source:
        words = r"update\.ipc\.tensors: lacks"
        assert_refused(served, update_from(source), iter(()), UpdateInvalid, words)

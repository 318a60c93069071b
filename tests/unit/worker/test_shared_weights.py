"""Weights by shared memory and by broadcast are the weights that files make, to the digest."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.weight_broadcast import broadcast
from tests.support.refused_updates import Served, assert_refused, note_receivers, serve
from tests.support.runner_rig import generate
from tests.support.shared_weights import Trainer, shared, update_from
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import build, from_disk, prepare, swap, tensors_in, two_models
from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import Placement, TensorDescription
from worker_service.runner.interface import PreparationCancelled
from worker_service.weights.sources.distributed import buckets_of, staged_bytes

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def digest_of_files(served: Served) -> str:
    prepared = prepare(served.runner, from_disk(served.new))
    prepared.drop()
    return prepared.facts.digest


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture(autouse=True)
def noted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    note_receivers(served, monkeypatch)


@pytest.mark.parametrize("gap", [0, 1, 4096])
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_shared_memory(
    served: Served, digest_of_files: str, gap: int, placement: Placement
) -> None:
    with shared(served.tensors, gap) as source:
        prepared = prepare(served.runner, update_from(source, placement=placement))
    assert prepared.facts.digest == digest_of_files
    assert prepared.facts.host_bytes == sum(each.nbytes for each in served.tensors.values())
    prepared.drop()


@pytest.mark.parametrize("bucket_bytes", [0, 1, 5000, 20_000, 1 << 40])
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_broadcasts(
    served: Served,
    trainer: Trainer,
    digest_of_files: str,
    bucket_bytes: int,
    placement: Placement,
) -> None:
    source = trainer.source(served.tensors, bucket_bytes=bucket_bytes)
    sending = trainer.start(source, served.tensors)
    prepared = prepare(served.runner, update_from(source, placement=placement))
    sending.join(10)
    assert not sending.is_alive() and not trainer.errors
    assert prepared.facts.digest == digest_of_files
    prepared.drop()


def test_tokens_are_those_of_a_fresh_start(tmp_path: Path, trainer: Trainer) -> None:
    old, new = two_models(tmp_path)
    fresh = generate(build(new, executor="torch"), PROMPTS, 6)
    runner = build(old, executor="torch")
    assert generate(runner, PROMPTS, 6) != fresh
    mixed = {
        name: each.double() if index % 2 else each
        for index, (name, each) in enumerate(tensors_in(new).items())
    }
    source = trainer.source(mixed, bucket_bytes=7001)
    trainer.start(source, mixed)
    swap(runner, update_from(source))
    assert generate(runner, PROMPTS, 6) == fresh
    some = {NORM: torch.zeros(48)}
    with shared(some) as memory:
        swap(runner, update_from(memory, is_partial=True))
    with shared({NORM: tensors_in(new)[NORM]}) as memory:
        swap(runner, update_from(memory, is_partial=True))
    assert generate(runner, PROMPTS, 6) == fresh


# --- what goes wrong on the way -------------------------------------------------------------------


def test_nobody_hosts_the_group(served: Served, trainer: Trainer) -> None:
    source = replace(trainer.source(served.tensors, timeout_seconds=0.3), port=1)
    assert_refused(served, update_from(source), iter(()), SourceLost, "can't be joined: no store")


def test_the_broadcaster_never_comes(served: Served, trainer: Trainer) -> None:
    source = trainer.source(served.tensors, timeout_seconds=0.3)
    assert_refused(served, update_from(source), iter(()), SourceLost, "not all members")


def test_the_broadcaster_goes_silent(served: Served, trainer: Trainer) -> None:
    done = threading.Event()
    source = trainer.source(served.tensors, timeout_seconds=1.0)
    trainer.start(source, served.tensors, lambda buckets: buckets[:3], until=done)
    assert_refused(served, update_from(source), iter(()), SourceLost, "no bucket came for 1 sec")
    done.set()


@pytest.mark.parametrize("count", range(0, 20, 3))
@pytest.mark.parametrize("bucket_bytes", [0, 9000])
def test_the_broadcaster_dies(
    served: Served, trainer: Trainer, count: int, bucket_bytes: int
) -> None:
    source = trainer.source(served.tensors, bucket_bytes=bucket_bytes)
    trainer.start(source, served.tensors, lambda buckets: buckets[: min(count, len(buckets) - 1)])
    assert_refused(served, update_from(source), iter(()), SourceLost, "rank 0, which broadcasts")


@pytest.mark.parametrize("announced", ["1", "1,2,3", "x", ",", "0" * 100_000])
def test_other_buckets_are_announced(served: Served, trainer: Trainer, announced: str) -> None:
    source = trainer.source(served.tensors, bucket_bytes=5000, timeout_seconds=5.0)
    sending = trainer.start(source, served.tensors, announced=announced)
    words = "rank 0 broadcasts other buckets"
    assert_refused(served, update_from(source), iter(()), SourceLost, words)
    assert sending.is_alive()  # it waits for the worker, which has not joined


@pytest.mark.parametrize("change", [-188, -100, -16])
def test_a_bucket_comes_short(served: Served, trainer: Trainer, change: int) -> None:
    """Gloo takes it for whole; of a few bytes less only the digests tell."""

    def resized(buckets: list[torch.Tensor]) -> list[torch.Tensor]:
        buckets[2] = torch.zeros(buckets[2].numel() + change, dtype=torch.uint8)
        return buckets

    source = trainer.source(served.tensors, timeout_seconds=5.0)
    bare = tuple(replace(each, sha256=b"") for each in source.tensors)
    assert source.tensors[2].byte_count == 192
    source = replace(source, tensors=bare)
    trainer.start(source, served.tensors, resized)
    assert_refused(served, update_from(source), iter(()), SourceLost, "rank 0, which broadcasts")


def test_a_bucket_that_is_a_byte_short_has_another_digest(served: Served, trainer: Trainer) -> None:
    def resized(buckets: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*buckets[:2], buckets[2][:-1], *buckets[3:]]

    source = trainer.source(served.tensors)
    trainer.start(source, served.tensors, resized)
    words = r"distributed.tensors\[2\].sha256: the bytes"
    assert_refused(served, update_from(source), iter(()), UpdateInvalid, words)


@pytest.mark.parametrize("stage", ["the store", "the group", "a bucket"])
def test_an_abort_ends_the_wait(served: Served, trainer: Trainer, stage: str) -> None:
    """Long before the hour that it would take."""
    over, stop = threading.Event(), threading.Event()
    source = trainer.source(served.tensors, timeout_seconds=3600.0)
    if stage == "the store":
        source = replace(source, port=1)
    if stage == "a bucket":
        trainer.start(source, served.tensors, lambda buckets: buckets[:2], until=over)
    preparation = served.runner.begin_update(update_from(source), stop.is_set)
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    started = time.monotonic()
    with pytest.raises(PreparationCancelled):
        preparation.finish()
    assert time.monotonic() - started < 60
    preparation.close()
    over.set()
    timer.join()
    assert served.runner.memory_pool().kept_tensors_bytes == 0


# --- buckets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_buckets_hold_what_fits(seed: int) -> None:
    """Every tensor once, in order; none that would have fit is left for the next."""
    drawn = random.Random(seed)
    sizes = [drawn.choice([1, 2, 3, 10, 100]) for _ in range(drawn.randrange(1, 40))]
    tensors = [TensorDescription(str(index), "F32", (size,)) for index, size in enumerate(sizes)]
    limit = drawn.choice([0, 1, 4, 12, 40, 400, 1 << 62])
    buckets = buckets_of(tensors, limit)
    assert [index for bucket in buckets for index in bucket.indices] == list(range(len(sizes)))
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        assert bucket.byte_count == sum(4 * sizes[index] for index in bucket.indices)
        assert bucket.byte_count <= limit or len(bucket.indices) == 1
        if following is not None:
            assert bucket.byte_count + 4 * sizes[following.indices.start] > limit
    assert staged_bytes(buckets) <= 2 * min(limit, 4 * sum(sizes))


# --- what trainers import -------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [0, 12_345, 1 << 40])
def test_the_example_of_a_trainer_broadcasts(
    served: Served, trainer: Trainer, digest_of_files: str, bucket_bytes: int
) -> None:
    source = trainer.source(served.tensors, bucket_bytes=bucket_bytes)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(
            broadcast, served.tensors, trainer.store, source.key, bucket_bytes=bucket_bytes
        )
        prepared = prepare(served.runner, update_from(source))
        sent.result(30)
    assert prepared.facts.digest == digest_of_files
    prepared.drop()

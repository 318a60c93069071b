"""A runner whose updates are refused, and what must be as it was then."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.weight_updates import build, tensors_in, two_models
from worker_service.domain.errors import WorkerError
from worker_service.domain.weights import TensorChunk, TensorDescription, WeightsUpdate
from worker_service.runner import preparation
from worker_service.runner.model_runner import ModelRunner
from worker_service.weights.sources.stream import StreamReceiver

Tensors = dict[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class Served:
    """A runner that serves `old`, beside `new`; `made` is whatever updates have taken."""

    runner: ModelRunner
    root: Path
    new: Path
    tensors: Tensors
    made: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        """Takes a note of each executor."""
        store = self.runner._weights
        kind = store.recipe.executor

        def load(*given: Any) -> Any:
            executor = kind.load(*given)
            self.made.add(executor)
            return executor

        store.recipe = replace(store.recipe, executor=replace(kind, load=load))


def serve(root: Path) -> Served:
    """A runner with a model below `root`, where its updates may read."""
    old, new = two_models(root)
    runner = build(old, weights_root=root, executor="torch")
    return Served(runner, root, new, tensors_in(new))


def note_receivers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a note of each receiver of a stream."""

    def receive(tensors: Sequence[TensorDescription]) -> StreamReceiver:
        receiver = StreamReceiver(tensors)
        served.made.add(receiver)
        return receiver

    monkeypatch.setattr(preparation, "StreamReceiver", receive)


def assert_refused(
    served: Served,
    update: WeightsUpdate,
    given: Iterator[TensorChunk],
    kind: type[WorkerError],
    words: str,
) -> WorkerError:
    """The update ends with this error, and with it all that it took."""
    runner, store = served.runner, served.runner._weights
    before = (runner.capability(), store.executor, store.live, runner.tensors())
    made = None
    with pytest.raises(kind, match=words) as raised:
        try:
            made = runner.begin_update(update, lambda: False)
            for chunk in given:
                made.put(chunk)
            made.finish()
        finally:
            if made is not None:
                made.close()
    error = raised.value
    raised.value.__traceback__ = None
    error.__cause__ = error.__context__ = None
    del made, raised
    assert not served.made, "memory is kept"
    assert (runner.capability(), store.executor, store.live, runner.tensors()) == before
    pool = runner.memory_pool()
    assert pool.prepared_bytes == pool.kept_tensors_bytes == 0
    return error


Change = Callable[[Tensors], Any]


def without(name: str) -> Change:
    """Takes a tensor away."""
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Change:
    """Puts a tensor there."""
    return lambda tensors: tensors.update({name: value})


def copied(served: Served, name: str) -> Path:
    """Another folder with the new weights."""
    folder = served.root / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(served.new, folder)
    return folder

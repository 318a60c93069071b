"""An update from its description to weights that wait for their commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import assert_never

import torch

from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import (
    NUMBER_BYTES,
    DiskSource,
    DistributedSource,
    IpcSource,
    Placement,
    PreparedWeights,
    StreamSource,
    Target,
    TensorChunk,
    TensorDescription,
    WeightsUpdate,
)
from worker_service.model.accounting import account_for, listed
from worker_service.model.registry import describe
from worker_service.model.spec import DecoderSpec
from worker_service.runner.interface import PreparationCancelled, Prepared
from worker_service.runner.weight_store import WeightStore, explained
from worker_service.weights import chunks, paths
from worker_service.weights.checkpoint import Checkpoint
from worker_service.weights.paths import allowed_path
from worker_service.weights.record import Place, WeightsRecord, places_of
from worker_service.weights.sources import distributed, ipc
from worker_service.weights.sources.disk import DiskReceiver
from worker_service.weights.sources.distributed import DistributedReceiver
from worker_service.weights.sources.interface import Receiver, TensorSource
from worker_service.weights.sources.ipc import IpcReceiver
from worker_service.weights.sources.kept import Overlay
from worker_service.weights.sources.stream import StreamReceiver


class ModelPreparation:
    """interface.Preparation. Used on the thread that prepares weights."""

    def __init__(
        self, store: WeightStore, update: WeightsUpdate, is_cancelled: Callable[[], bool]
    ) -> None:
        """Checks what the description shows, then takes the memory. Raises UpdateInvalid or
        MemoryLacking."""
        self._store = store
        self._recipe = store.recipe
        self._update = update
        self._is_cancelled = is_cancelled
        self._prepared: Prepared | None = None
        self._check()
        if update.target is not Target.MODEL:
            raise UpdateInvalid("update.target", "this worker has no draft model")
        self._names = {tensor.name for tensor in self._spec.tensors()}
        source = update.source
        match source:
            case DiskSource(path=path):
                self._field = paths.FIELD
                found = allowed_path(path, self._recipe.root)
                self._placement = self._recipe.place(update.placement, 0)
                self._receiver: Receiver | None = DiskReceiver(found)
            case StreamSource(tensors=tensors):
                self._field = chunks.FIELD
                fitting = self._fitting(tensors)
                with explained(self._field), self._recipe.plan.explained():
                    self._receiver = StreamReceiver(fitting)
            case DistributedSource(tensors=tensors):
                self._field = distributed.FIELD
                distributed.require_backend(source, self._recipe.config.device)
                self._fitting(tensors, staged_of=source.bucket_bytes)
                with explained(self._field), self._recipe.plan.explained():
                    self._receiver = DistributedReceiver(source, self._recipe.config.device)
            case IpcSource(tensors=tensors):
                self._field = ipc.FIELD
                self._fitting(tensors, element=".tensor")
                ipc.require_layout(source)
                with explained(self._field), self._recipe.plan.explained():
                    self._receiver = IpcReceiver(source, self._recipe.config.device)
            case _:
                assert_never(source)

    def put(self, chunk: TensorChunk) -> None:
        """See Preparation."""
        assert self._receiver is not None
        self._receiver.put(chunk)

    @torch.inference_mode()
    def finish(self) -> Prepared:
        """See Preparation."""
        receiver, self._receiver = self._receiver, None
        assert receiver is not None, "an update is prepared once"
        with explained(self._field), ExitStack() as stack:
            fresh = stack.enter_context(receiver.receive(self._check))
            del receiver
            source = fresh
            if self._update.is_partial:
                base = stack.enter_context(self._store.live.open(self._check))
                source = self._overlay(fresh, base)
            self._require_same_model(fresh, source)
            self._require_numbers(fresh, self._names & fresh.names())
            record = self._record(fresh, source)
            digest = self._recipe.version_digest(record.digest)
            expected = self._update.expected_digest
            if expected and expected != digest:
                raise UpdateInvalid(
                    "update.expected_digest", f"the weights have the digest {digest}"
                )
            prepared = self._prepare(source, record, digest)
            if isinstance(fresh, Checkpoint):
                fresh.require_unchanged()
            return prepared

    def close(self) -> None:
        """See Preparation."""
        self._receiver = None
        if self._prepared is not None:
            self._prepared.drop()

    @property
    def _spec(self) -> DecoderSpec:
        return self._recipe.config.spec

    def _check(self) -> None:
        if self._is_cancelled():
            raise PreparationCancelled

    def _fitting(
        self, tensors: Sequence[TensorDescription], *, element: str = "", staged_of: int = 0
    ) -> Sequence[TensorDescription]:
        """Tensors that are described one by one, once they fit the model and the memory.
        `staged_of`: the size of the buckets in which they come."""
        is_partial = self._update.is_partial
        require_fitting(self._field, tensors, self._spec, is_partial=is_partial, element=element)
        kept = sum(tensor.byte_count for tensor in tensors)
        staged = distributed.staged_bytes(distributed.buckets_of(tensors, staged_of))
        self._placement = self._recipe.place(self._update.placement, kept + staged)
        return tensors

    def _overlay(self, fresh: TensorSource, base: TensorSource) -> TensorSource:
        """The live weights with those of a partial update over them."""
        found = fresh.names()
        tied = self._spec.tied_head
        unknown = found - self._names - self._spec.ignored - ({tied} if tied else set())
        if unknown:
            raise UpdateInvalid(self._field, f"the model has not {listed(unknown)}")
        if not found & self._names:
            raise UpdateInvalid(self._field, "holds none of the model's tensors")
        owners = dict.fromkeys(base.names(), base) | dict.fromkeys(found, fresh)
        return Overlay(fresh.origin, owners)

    def _require_same_model(self, fresh: TensorSource, source: TensorSource) -> None:
        """Raises UpdateInvalid where the weights make another decoder than the live ones, or
        CheckpointInvalid where they make none."""
        described = self._recipe.described
        if isinstance(fresh, Checkpoint):
            described = describe(fresh.config)
            if _without_format(described) != _without_format(self._recipe.described):
                raise UpdateInvalid(
                    self._field,
                    f"config.json describes another model than the live {self._spec.architecture}: "
                    f"{_difference(described, self._recipe.described)}",
                )
        settled = account_for(source, described)
        if _without_format(settled) != _without_format(self._spec):
            raise UpdateInvalid(
                self._field,
                "the head or the embedding is another tensor than in the live weights, which "
                + ("tie the two" if self._spec.head is None else "hold a head of its own"),
            )

    def _require_numbers(self, source: TensorSource, names: Iterable[str]) -> None:
        """Raises UpdateInvalid for a tensor with NaN, or with numbers too large for the format that
        the worker computes in."""
        shapes = {tensor.name: tensor.stored_shape for tensor in self._spec.tensors()}
        for name in sorted(names):
            self._check()
            tensor = source.tensor(name, shapes[name])
            extremes = torch.stack(torch.aminmax(tensor.reshape(-1)))
            if extremes.isnan().any():
                raise UpdateInvalid(self._field, f"the tensor {name} holds NaN")
            converted = extremes.to(self._recipe.config.data_type)
            if (converted.isinf() & extremes.isfinite()).any():
                kind = str(self._recipe.config.data_type).removeprefix("torch.")
                raise UpdateInvalid(
                    self._field, f"the tensor {name} holds numbers that are too large for {kind}"
                )

    def _record(self, fresh: TensorSource, source: TensorSource) -> WeightsRecord:
        live, own = self._store.live, self._names & fresh.names()
        config = live.config
        if isinstance(fresh, Checkpoint) and not self._update.is_partial:
            config = fresh.config_bytes()
        places: dict[str, Place] = {} if not self._update.is_partial else dict(live.places)
        places |= places_of(fresh, own)
        return WeightsRecord(config, source.describe(self._names, self._check), places)

    def _prepare(self, source: TensorSource, record: WeightsRecord, digest: str) -> Prepared:
        executor, device_bytes = None, 0
        if self._placement is Placement.BESIDE:
            executor = self._recipe.load(source, self._check)
            device_bytes = executor.weights_bytes + executor.workspace_bytes
        live = {id(tensor) for tensor in self._store.live.kept.values()}
        facts = PreparedWeights(
            update_id=self._update.update_id,
            digest=digest,
            placement=self._placement,
            device_bytes=device_bytes,
            host_bytes=sum(each.nbytes for each in record.kept.values() if id(each) not in live),
        )
        self._prepared = self._store.keep(facts, record, executor)
        return self._prepared


def require_fitting(
    field_path: str,
    tensors: Sequence[TensorDescription],
    spec: DecoderSpec,
    *,
    is_partial: bool,
    element: str = "",
) -> None:
    """Raises UpdateInvalid, naming the tensor and what of it is wrong, unless the descriptions are
    the model's tensors, all of them or, where the update is partial, some. `element`: where in an
    entry of the field its description is."""
    shapes = {tensor.name: tensor.stored_shape for tensor in spec.tensors()}
    allowed = dict(shapes)
    if spec.tied_head is not None:
        allowed.setdefault(spec.tied_head, spec.embedding.stored_shape)
    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        where = f"{field_path}[{index}]{element}"
        shape = allowed.get(tensor.name)
        if shape is None:
            raise UpdateInvalid(f"{where}.name", f"the model has no tensor {tensor.name[:200]!r}")
        if tensor.name in seen:
            raise UpdateInvalid(f"{where}.name", f"the tensor {tensor.name} comes twice")
        seen.add(tensor.name)
        if tensor.number_format not in NUMBER_BYTES:
            formats = ", ".join(NUMBER_BYTES)
            raise UpdateInvalid(f"{where}.data_type", f"of {tensor.name} must be one of {formats}")
        if tensor.shape != shape:
            raise UpdateInvalid(
                f"{where}.shape",
                f"the tensor {tensor.name} has {list(tensor.shape)[:8]}, the model's {list(shape)}",
            )
    missing = set() if is_partial else set(shapes) - seen
    if missing:
        raise UpdateInvalid(field_path, f"lacks {listed(missing)}; a partial update may")
    if not seen & set(shapes):
        raise UpdateInvalid(field_path, "has none of the model's tensors")


def _without_format(spec: DecoderSpec) -> DecoderSpec:
    """The spec but for the format that the weights were published in, which is not the one that
    they are computed in."""
    return replace(spec, data_type=None)


def _difference(found: DecoderSpec, live: DecoderSpec) -> str:
    """The first thing that differs, for people."""
    for name in ("architecture", "vocabulary_size", "hidden_size", "max_length"):
        one, other = getattr(found, name), getattr(live, name)
        if one != other:
            return f"{name} is {one}, not {other}"
    if len(found.layers) != len(live.layers):
        return f"{len(found.layers)} layers, not {len(live.layers)}"
    return "its layers differ"

"""The weights of a model that serves: what is live, what was prepared, and how both are loaded.

Every load here is the load of a start: the same spec, loader and executor over the same KV pool.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from twinplane.models import ModelError
from worker_service.domain.errors import Asleep, MemoryLacking, UpdateInvalid
from worker_service.domain.weights import Placement, PreparedWeights
from worker_service.load_errors import KVPoolTooLarge, LoadError, OutOfMemory
from worker_service.model.loader import WeightLoader
from worker_service.model.spec import DecoderSpec
from worker_service.runner.executor import Executor, ExecutorConfig, ExecutorType
from worker_service.runner.interface import RestoreFailed
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.memory_plan import Memory, MemoryPlan, in_units
from worker_service.weights.record import WeightsRecord
from worker_service.weights.sources.interface import Check, TensorSource, no_check


@dataclass(frozen=True, slots=True, eq=False)
class LoadRecipe:
    """How this worker loads weights. `described` is what config.json says, before the files settle
    the head; `version_digest` makes a weight version's digest of that of the content. `memory`
    tells what the device and the host have now. `root`: where files may be read, None: nowhere."""

    executor: ExecutorType
    config: ExecutorConfig
    cache: KVCache
    plan: MemoryPlan
    described: DecoderSpec
    version_digest: Callable[[str], str]
    memory: Callable[[], tuple[Memory, Memory]]
    root: Path | None = None

    @property
    def loaded_bytes(self) -> int:
        """What another executor takes of the device."""
        return self.plan.weights_bytes + self.plan.workspace_bytes

    def load(
        self,
        source: TensorSource,
        check: Check = no_check,
        report: Callable[[str], None] = lambda line: None,
    ) -> Executor:
        """An executor of these tensors. `check` is called between layers, and `report` told of
        them. Raises LoadError."""

        def progress(line: str) -> None:
            check()
            report(line)

        config = replace(self.config, progress=progress)
        with torch.inference_mode(), self.plan.explained():
            loader = WeightLoader(source, config.share, config.data_type, config.device)
            executor = self.executor.load(config, loader, self.cache)
        loader.finish()
        return executor

    def place(self, wanted: Placement, kept_bytes: int) -> Placement:
        """Where an update can wait that keeps so many bytes on the host. Raises MemoryLacking, with
        the sizes, where there is no room."""
        device, host = self.memory()
        if device == host:
            short = self.loaded_bytes + kept_bytes - host.free_bytes
        else:
            short = self.loaded_bytes - device.free_bytes
        if kept_bytes > host.free_bytes:
            raise MemoryLacking(
                f"the update's tensors take {in_units(kept_bytes)} as they come, and "
                f"{in_units(host.free_bytes)} are free on {host.name}"
            )
        if short <= 0 and wanted is not Placement.IN_PLACE:
            return Placement.BESIDE
        if wanted is Placement.BESIDE:
            kept = f" and the tensors as they come {in_units(kept_bytes)}" if kept_bytes else ""
            raise MemoryLacking(
                f"another set of weights takes {in_units(self.plan.weights_bytes)}, the buffers of "
                f"its steps {in_units(self.plan.workspace_bytes)}{kept}: {in_units(short)} more "
                f"than the {in_units(device.free_bytes)} that are free on {device.name}; an update "
                "in place needs no room beside the live weights"
            )
        return Placement.IN_PLACE


class PreparedModel:
    """interface.Prepared. `executor` is loaded, or None where the weights wait in place; after the
    commit it is the one that was live before."""

    def __init__(
        self,
        store: WeightStore,
        facts: PreparedWeights,
        record: WeightsRecord,
        executor: Executor | None,
    ) -> None:
        self._store = store
        self._facts = facts
        self.record: WeightsRecord | None = record
        self.executor = executor

    @property
    def facts(self) -> PreparedWeights:
        """See Prepared."""
        return self._facts

    def drop(self) -> None:
        """See Prepared."""
        self.record = None
        self.executor = None
        self._store.forget(self)


class WeightStore:
    """What is live and what waits. `executor` belongs to the device thread; None while it sleeps.

    `prepared` is set and forgotten on the thread that prepares weights, or by a commit.
    """

    def __init__(self, recipe: LoadRecipe, live: WeightsRecord, executor: Executor) -> None:
        self.recipe = recipe
        self.live = live
        self._executor: Executor | None = executor
        self._prepared: PreparedModel | None = None

    @property
    def executor(self) -> Executor:
        """What runs steps. Raises Asleep."""
        if self._executor is None:
            raise Asleep("the weights are not on the device: wake the worker")
        return self._executor

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are on the device."""
        return self._executor is not None

    @property
    def live_bytes(self) -> tuple[int, int]:
        """What the live weights and the buffers of a step take of the device."""
        executor = self._executor
        return (0, 0) if executor is None else (executor.weights_bytes, executor.workspace_bytes)

    @property
    def prepared_bytes(self) -> int:
        """What prepared weights take of the device."""
        prepared = self._prepared
        return 0 if prepared is None else prepared.facts.device_bytes

    @property
    def kept_bytes(self) -> int:
        """What tensors that did not come from files take of the host, live and prepared."""
        prepared = self._prepared
        record = None if prepared is None else prepared.record
        kept = [self.live.kept, {} if record is None else record.kept]
        return sum({id(each): each.nbytes for some in kept for each in some.values()}.values())

    def keep(
        self, facts: PreparedWeights, record: WeightsRecord, executor: Executor | None
    ) -> PreparedModel:
        """Takes over what was prepared."""
        self._prepared = PreparedModel(self, facts, record, executor)
        return self._prepared

    def forget(self, prepared: PreparedModel) -> None:
        """It was dropped or committed."""
        if self._prepared is prepared:
            self._prepared = None

    def commit(self, prepared: PreparedModel) -> None:
        """Makes it live. See Updatable.commit_update."""
        live, record = self.executor, prepared.record
        assert record is not None, "a commit of what was dropped"
        if prepared.facts.placement is Placement.BESIDE:
            self._executor, prepared.executor = prepared.executor, live
        else:
            del live
            self._replace(record)
        self.live, prepared.record = record, None
        self.forget(prepared)

    def unload(self) -> None:
        """Frees the live weights. `live` says where they are."""
        self._executor = None

    def reload(self) -> None:
        """Loads the live weights again. Raises MemoryLacking or RestoreFailed."""
        try:
            with explained("wake"):
                self._executor = self._load(self.live)
        except UpdateInvalid as error:
            raise RestoreFailed(error.description) from error

    def _replace(self, record: WeightsRecord) -> None:
        """In place: frees the live weights before it loads the others."""
        self._executor = None
        try:
            with explained("update"):
                self._executor = self._load(record)
        except BaseException as failure:
            _release(failure)
            try:
                self._executor = self._load(self.live)
            except Exception as error:
                raise RestoreFailed(
                    f"the weights before it can't be loaded again: {error}"
                ) from error
            raise

    def _load(self, record: WeightsRecord) -> Executor:
        with record.open() as source:
            return self.recipe.load(source)


def _release(error: BaseException | None) -> None:
    """Frees what the frames of an error still hold: half-loaded weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def explained(field_path: str) -> Iterator[None]:
    """Raises UpdateInvalid, with this field's name, or MemoryLacking for why weights can't be
    loaded."""
    try:
        yield
    except (OutOfMemory, KVPoolTooLarge) as error:
        raise MemoryLacking(str(error)) from error
    except (LoadError, ModelError) as error:
        raise UpdateInvalid(field_path, str(error)) from error

"""What the real runner does with other weights, and when it sleeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from worker_service.domain.capability import Capability
from worker_service.domain.errors import PlanMismatch
from worker_service.domain.plan import WeightVersion
from worker_service.domain.weights import SleepTag, TensorDescription, WeightsUpdate
from worker_service.runner.interface import Preparation, Prepared
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.preparation import ModelPreparation
from worker_service.runner.request_state import RequestState
from worker_service.runner.weight_store import PreparedModel, WeightStore, explained


class ChangesWeights:
    """Part of ModelRunner: interface.Updatable and interface.Sleeper."""

    _capability: Capability
    _weights: WeightStore
    _cache: KVCache
    _state: RequestState

    def begin_update(self, update: WeightsUpdate, is_cancelled: Callable[[], bool]) -> Preparation:
        return ModelPreparation(self._weights, update, is_cancelled)

    def commit_update(self, prepared: Prepared) -> WeightVersion:
        assert isinstance(prepared, PreparedModel), "prepared by another runner"
        self._weights.commit(prepared)
        generation = self._capability.weight_version.generation + 1
        version = WeightVersion(generation, prepared.facts.digest)
        self._capability = replace(self._capability, weight_version=version)
        return version

    def tensors(self) -> tuple[TensorDescription, ...]:
        return tuple(each for _, each in sorted(self._weights.live.descriptions.items()))

    @torch.inference_mode()
    def sleep(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        if SleepTag.KV in tags:
            if self._state.active.any():
                raise PlanMismatch("rows of the persistent batch need their KV: remove them first")
            self._cache.free()
        if SleepTag.WEIGHTS in tags:
            self._weights.unload()
        return self._asleep()

    @torch.inference_mode()
    def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        takes_kv = SleepTag.KV in tags and not self._cache.is_held
        if takes_kv:
            with explained("tags"):
                self._cache.take()
        if SleepTag.WEIGHTS in tags and not self._weights.is_loaded:
            try:
                self._weights.reload()
            except BaseException:
                if takes_kv:
                    self._cache.free()
                raise
        return self._asleep()

    def _asleep(self) -> frozenset[SleepTag]:
        parts = ((SleepTag.WEIGHTS, self._weights.is_loaded), (SleepTag.KV, self._cache.is_held))
        return frozenset(tag for tag, is_there in parts if not is_there)

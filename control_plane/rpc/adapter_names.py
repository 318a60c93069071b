"""Which adapter a request names: in a field of its own, or behind the model's name and a colon."""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.core.request import Adapter
from control_plane.rpc.checker import Checker
from control_plane.rpc.errors import UnknownModel
from control_plane.rpc.validation import check_model
from control_plane.shell.adapter_registry import (
    AdapterRegistry,
    AdapterUnknown,
    RegisteredAdapter,
)
from control_plane.shell.engine import ServedModel
from twinplane.inference.v1 import inference_pb2

_MOST_LISTED = 16
"""Names of adapters in a refusal."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What answers a request. `name` is what it was told to be called."""

    model: ServedModel
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """As ListModels lists it."""
        return listed_name(self.model, self.adapter)

    @property
    def adapter_digest(self) -> str:
        """Empty without an adapter."""
        return "" if self.adapter is None else self.adapter.digest


def listed_name(model: ServedModel, adapter: Adapter | None) -> str:
    """What ListModels calls a model, or an adapter of it."""
    return model.name if adapter is None else f"{model.name}:{adapter.name}"


def choose(
    model_name: str,
    adapter_name: str,
    served: ServedModel | None,
    registry: AdapterRegistry,
    away_seconds: float,
) -> Chosen:
    """What the names mean now. Raises UnknownModel, NoModelServed, or InvalidRequest where they
    name two adapters."""
    behind = ""
    if served is not None and model_name != served.name:
        behind = model_name.removeprefix(f"{served.name}:")
        behind = "" if behind == model_name else behind
    if not behind:
        try:
            model = check_model(model_name, served, away_seconds)
        except UnknownModel as error:
            raise UnknownModel(model_name, [*error.served, *_listed(served, registry)]) from None
    else:
        assert served is not None
        model = served
        checker = Checker()
        checker.require(
            adapter_name in ("", behind), "adapter", "is another adapter than the model's name has"
        )
        checker.raise_if_any()
    name = adapter_name or behind
    if not name:
        return Chosen(model)
    try:
        return Chosen(model, registry.named(name).adapter)
    except AdapterUnknown:
        asked = f"{model.name}:{name}"
        raise UnknownModel(asked, [model.name, *_listed(model, registry)]) from None


def _listed(served: ServedModel | None, registry: AdapterRegistry) -> list[str]:
    assert served is not None
    names = [f"{served.name}:{name}" for name in registry.names(_MOST_LISTED)]
    if (more := registry.count - len(names)) > 0:
        names.append(f"{more} more adapters")
    return names


def adapter_to_pb(
    base: inference_pb2.ServedModel, registered: RegisteredAdapter
) -> inference_pb2.ServedModel:
    """An adapter as ListModels lists it: what it does not change is as the base has it."""
    message = inference_pb2.ServedModel()
    message.CopyFrom(base)
    adapter = registered.adapter
    message.name, message.base_model = f"{base.name}:{adapter.name}", base.name
    message.adapter_digest = adapter.digest
    return message

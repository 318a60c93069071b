"""Twinplane: LLM serving in two planes that talk a typed, versioned gRPC contract.

The client's names are imported on first use, so that `import twinplane` stays quick and loads
neither gRPC nor protobuf.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinplane.client.aio import AsyncClient, AsyncGeneration
    from twinplane.client.options import GenerateOptions
    from twinplane.client.retry import RetryPolicy
    from twinplane.client.sync import Client, Generation
    from twinplane.client.values import (
        Delta,
        FinishReason,
        GenerationOrigin,
        GenerationResult,
        Health,
        Message,
        MessageDict,
        ReplicaState,
        SamplingDefaults,
        ServedModel,
        ServingWorker,
        TlsCredentials,
        Usage,
        WeightsSpan,
        WeightVersion,
        WorkerState,
    )
    from twinplane.errors import (
        Cancelled,
        ClientUnusable,
        DeadlineExceeded,
        InternalError,
        InvalidAddress,
        InvalidRequest,
        ModelNotFound,
        Overloaded,
        PartialGeneration,
        TwinplaneError,
        Unavailable,
        Violation,
        WeightsChanged,
        WrongServer,
    )

__version__ = "0.2.0"

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "Cancelled",
    "Client",
    "ClientUnusable",
    "DeadlineExceeded",
    "Delta",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationOrigin",
    "GenerationResult",
    "Health",
    "InternalError",
    "InvalidAddress",
    "InvalidRequest",
    "Message",
    "MessageDict",
    "ModelNotFound",
    "Overloaded",
    "PartialGeneration",
    "ReplicaState",
    "RetryPolicy",
    "SamplingDefaults",
    "ServedModel",
    "ServingWorker",
    "TlsCredentials",
    "TwinplaneError",
    "Unavailable",
    "Usage",
    "Violation",
    "WeightVersion",
    "WeightsChanged",
    "WeightsSpan",
    "WorkerState",
    "WrongServer",
    "__version__",
]

_HOMES = {
    "twinplane.client.aio": ("AsyncClient", "AsyncGeneration"),
    "twinplane.client.options": ("GenerateOptions",),
    "twinplane.client.retry": ("RetryPolicy",),
    "twinplane.client.sync": ("Client", "Generation"),
    "twinplane.client.values": (
        "Delta",
        "FinishReason",
        "GenerationOrigin",
        "GenerationResult",
        "Health",
        "Message",
        "MessageDict",
        "ReplicaState",
        "SamplingDefaults",
        "ServedModel",
        "ServingWorker",
        "TlsCredentials",
        "Usage",
        "WeightVersion",
        "WeightsSpan",
        "WorkerState",
    ),
    "twinplane.errors": (
        "Cancelled",
        "ClientUnusable",
        "DeadlineExceeded",
        "InternalError",
        "InvalidAddress",
        "InvalidRequest",
        "ModelNotFound",
        "Overloaded",
        "PartialGeneration",
        "TwinplaneError",
        "Unavailable",
        "Violation",
        "WeightsChanged",
        "WrongServer",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker that saw it would believe in every name

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

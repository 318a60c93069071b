"""What the client edge needs of the engine behind it, as a protocol, and how the engine refuses.

EngineError
├── DuplicateRequest     the id is running already
├── EngineDraining       the server accepts nothing more
├── EngineLost           the worker is gone and the request could not go on
├── EnginePaused         an operator has paused the server
├── WeightsChanged       the weights it began with are gone, and it was not to go on with others
├── AdapterUnavailable   the adapter that the request names can't be loaded now
├── CannotResume         the tokens that the request brings would not go on as they began
└── VocabularyMismatch   the tokenizer and the worker's model do not belong together
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from control_plane.core.events import FinishReason
from control_plane.core.plan import WeightVersion
from control_plane.core.request import Request, RequestId
from control_plane.shell.stream import TokenStream


class EngineError(Exception):
    """Base of what the engine refuses for reasons of its own."""


class DuplicateRequest(EngineError):
    """A request of this id is not finished."""


class EngineDraining(EngineError):
    """The server finishes what runs and accepts nothing more."""


class EngineLost(EngineError):
    """No worker can execute the request now."""


class EnginePaused(EngineError):
    """An operator has paused the server, and had new requests refused."""


class WeightsChanged(EngineError):
    """Other weights came, and the operator chose that nothing goes on from the old to the new."""


class AdapterUnavailable(EngineError):
    """The adapter that the request names can't be loaded at the moment."""


class CannotResume(EngineError):
    """Tokens that the request brings were not made as they would go on. `differs` says in what:
    weights, arithmetic, adapter or prompt.
    """

    def __init__(self, *differs: str) -> None:
        super().__init__(
            f"the tokens to resume from were made otherwise than they would go on here: the"
            f" {' and the '.join(differs)} changed"
        )
        self.differs = differs


class VocabularyMismatch(EngineError):
    """The prompt has tokens that the worker's model lacks. Waiting does not help: one of the planes
    is configured with the wrong model.
    """


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers. `max_sequence_token_count` counts prompt and output."""

    name: str
    max_sequence_token_count: int
    vocabulary_size: int
    weight_version: WeightVersion


class Engine(Protocol):
    """Runs requests. Every method runs on the event loop and returns at once."""

    def served_model(self) -> ServedModel | None:
        """What is served; None while no worker is attached."""
        ...

    def check_room(self) -> None:
        """Raises QueueFull, or EngineDraining, when a request that came now would be refused.

        Without any worker there is nothing to be full; it is for `submit` to say so.
        """
        ...

    def reserve(self) -> Callable[[], None]:
        """Takes a place for a request that is on its way, and returns what gives it back.

        To be given back once, just before `submit` at the latest. Raises what `check_room` raises.
        """
        ...

    def submit(self, request: Request, stream: TokenStream) -> None:
        """Queues a request whose tokens go to `stream`.

        Raises QueueFull, RequestTooLong or an EngineError; then nothing is held.
        """
        ...

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """Ends a request and frees what it holds at once; False if it is not running."""
        ...

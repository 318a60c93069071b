"""The values a caller of the client handles. Plain data: no gRPC, no protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias, TypedDict

from twinplane.paths import expand

DEFAULT_ADDRESS = "127.0.0.1:50051"
"""Where a control plane listens unless it is told otherwise."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` in the words of the model's chat template."""

    role: str
    content: str


class MessageDict(TypedDict):
    """A Message as a mapping."""

    role: str
    content: str


Conversation: TypeAlias = Sequence[Message | MessageDict]
"""The turns of a conversation, oldest first."""

Prompt: TypeAlias = str | Sequence[int | Message | MessageDict]
"""Plain text, token ids taken as they are, or a conversation.

One sequence type and not two, or mypy takes no list of dicts as it stands in a call.
"""


@dataclass(frozen=True, slots=True)
class GenerationOrigin:
    """What tokens are made with: the weights, with the name that the operator gave them, if any.

    `kv_of_other_weights`: the operator exchanged the weights under the generation, and had it go on
    over what the old ones had computed.
    """

    weights_digest: str
    weights_name: str = ""
    kv_of_other_weights: bool = False


@dataclass(frozen=True, slots=True)
class WeightsSpan:
    """Tokens, one after another, that the same weights have made; see GenerationOrigin."""

    token_count: int
    weights_digest: str
    weights_name: str = ""
    kv_of_other_weights: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """What was generated since the delta before. `text` holds whole characters only.

    Text may be empty while a character or a stop string is incomplete. `origin` says what these
    tokens are made with, in the first delta and whenever that has changed since; else it is None.
    """

    text: str
    token_ids: tuple[int, ...]
    origin: GenerationOrigin | None = None


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's length was reached."""
    UNKNOWN = "unknown"
    """A reason newer than this client."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens a request cost. Cached ones are part of the prompt's; the stop token is counted."""

    prompt_token_count: int
    cached_prompt_token_count: int
    completion_token_count: int


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A whole generation. At most one of `stop_string` and `stop_token_id` is set.

    `arithmetic_changed`: another worker went on with it that rounds differently, so it may not be
    what the same request and seed give on one worker. `weights_spans`: which weights made which
    tokens, in order; empty where the server is too old to tell.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    usage: Usage
    seed: int
    request_id: str
    model: str
    arithmetic_changed: bool = False
    weights_spans: tuple[WeightsSpan, ...] = ()


class Health(Enum):
    """Whether a server takes work."""

    SERVING = "serving"
    NOT_SERVING = "not serving"
    """It answers, and has no worker, loads a model, or shuts down."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Which weights: the count of swaps, from 1, and the hex SHA-256 of their content."""

    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds for the sampling options that a generation leaves out."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served. The longest sequence counts prompt and output.

    `default_sampling` is None where the server is too old to tell. `weights_name` is what the
    operator calls the weights; empty when they have no name. An adapter is a model of its own, with
    the name of the model that it changes and its digest.
    """

    name: str
    max_sequence_token_count: int
    vocabulary_size: int
    supports_chat: bool
    weight_version: WeightVersion
    default_sampling: SamplingDefaults | None = None
    weights_name: str = ""
    base_model: str = ""
    adapter_digest: str = ""


class WorkerState(Enum):
    """Whether a control plane has its worker."""

    ATTACHED = "attached"
    AWAY = "away"
    """It was attached, and can't be reached now."""
    AWAITED = "awaited"
    """None has come yet."""
    UNKNOWN = "unknown"
    """The server tells a state that this client is too old to know."""


class ReplicaState(Enum):
    """Where a replica is in its life, of which a worker is the only one or a rank."""

    JOINING = "joining"
    """Its worker was never there."""
    ATTACHED = "attached"
    SUSPECT = "suspect"
    """Its worker is attached, and has given no sign of life for a while."""
    LOST = "lost"
    """Its worker may come back."""
    DRAINING = "draining"
    """It leaves: it takes nothing new."""
    GONE = "gone"
    """Its worker has been lost for longer than requests wait."""
    UNKNOWN = "unknown"
    """The server tells none, or one that this client is too old to know."""


@dataclass(frozen=True, slots=True)
class ServingWorker:
    """A worker as its control plane sees it. `away_seconds` is None unless it is away.

    `replica` is the number of its replica, and `reason` says why that is in its state.

    The KV tokens are 0 unless it is attached. `free_kv_token_count` are those that new sequences
    can take, and `max_sequence_count` is the maximum number of sequences that run at once.
    """

    state: WorkerState
    worker_id: str
    device: str
    away_seconds: float | None
    kv_token_count: int
    free_kv_token_count: int
    max_sequence_count: int
    running_sequence_count: int
    waiting_sequence_count: int
    replica: int = 0
    address: str = ""
    replica_state: ReplicaState = ReplicaState.UNKNOWN
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TlsCredentials:
    """PEM data for TLS. Without roots the platform's are used; key and chain go together."""

    root_certificates: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    certificate_chain: bytes | None = None

    def __post_init__(self) -> None:
        for name in ("root_certificates", "private_key", "certificate_chain"):
            content = getattr(self, name)
            if not isinstance(content, bytes | None):
                kind = type(content).__name__
                raise TypeError(f"{name} must be bytes, not {kind}; from_files reads files")
        if (self.private_key is None) is not (self.certificate_chain is None):
            raise ValueError("private_key and certificate_chain go together")

    @classmethod
    def from_files(
        cls,
        root_certificates: Path | str | None = None,
        private_key: Path | str | None = None,
        certificate_chain: Path | str | None = None,
    ) -> TlsCredentials:
        """Reads the PEM files; `~` is the home folder. Raises OSError when one can't be read."""
        return cls(_read(root_certificates), _read(private_key), _read(certificate_chain))


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(expand(str(path))).read_bytes()

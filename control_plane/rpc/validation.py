"""Checks request messages against every rule of inference.proto, and turns them into values.

A refusal reports broken rules together, see checker.py, each with its field's path.
`check_prompt` and `check_stop_strings` check what depends on the model's tokenizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message

from control_plane.core.request import CONTRACT_DEFAULTS, SamplingParams
from control_plane.rpc.checker import Checker, in_vocabulary, within_length
from control_plane.rpc.errors import NoModelServed, UnknownModel
from control_plane.rpc.resumption import Resume, check_resume
from control_plane.shell.engine import ServedModel
from control_plane.text.chat_template import ChatMessage
from twinplane.bounds import SAMPLING_RANGES
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2

CHARACTERS_PER_TOKEN = 32
"""A text that has more characters than this for each token of the model's length can't fit."""

_MAX_PRIORITY = 100
_MAX_MESSAGES = 4096
"""Of a chat: looking at each takes about a microsecond of the event loop."""
_MAX_STOP_STRINGS = 16
_MAX_STOP_STRING_CHARACTERS = 256
_MAX_STOP_TOKENS = 64
_MAX_SALT_BYTES = 128
MAX_REQUEST_ID_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str
    field: str = "text"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, all within the vocabulary."""

    token_ids: array[int]
    field: str = "token_ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation of at least one turn."""

    messages: tuple[ChatMessage, ...]
    field: str = "chat.messages"


Prompt = TextPrompt | TokenPrompt | ChatPrompt

GenerationRequest = inference_pb2.GenerateRequest | inference_pb2.CompleteRequest
"""Both have the same fields, with the same meaning."""


@dataclass(frozen=True, slots=True)
class Stop:
    """When to stop. With `max_tokens` None, only the model's length bounds the output."""

    max_tokens: int | None
    strings: tuple[str, ...]
    token_ids: frozenset[int]
    ignore_end_of_sequence: bool


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked GenerationRequest. With `seed` None, the server chooses one."""

    prompt: Prompt
    sampling: SamplingParams
    seed: int | None
    stop: Stop
    priority: int
    cache_salt: str
    resume: Resume | None


@dataclass(frozen=True, slots=True)
class TokenizeCall:
    """A checked TokenizeRequest."""

    prompt: TextPrompt | ChatPrompt
    add_special_tokens: bool


def check_model(name: str, served: ServedModel | None, away_seconds: float = 0.0) -> ServedModel:
    """The model a request names; empty means the only one. Raises UnknownModel, NoModelServed."""
    if served is None:
        raise NoModelServed(away_seconds)
    if name not in ("", served.name):
        raise UnknownModel(name, [served.name])
    return served


def check_generate(
    request: GenerationRequest,
    model: ServedModel,
    default_sampling: SamplingParams = CONTRACT_DEFAULTS,
) -> GenerateCall:
    """Checks all but what needs the prompt's token count. Raises InvalidRequest.

    Sampling parameters that are unset are those of `default_sampling`.
    """
    checker = Checker()
    _few_messages(checker, request.chat)
    checker.known_fields(request)
    prompt: Prompt | None = None
    match request.WhichOneof("prompt"):
        case "text":
            checker.require(request.text != "", "text", "is empty")
            prompt = _text(checker, request.text, model)
        case "token_ids":
            prompt = _token_prompt(checker, request.token_ids, model)
        case "chat":
            prompt = _chat(checker, request.chat, model)
        case _:
            checker.require(False, "prompt", "one of text, token_ids and chat is needed")
    sampling = _sampling(checker, request.sampling, default_sampling)
    stop = _stop(checker, request.stop, model)
    checker.require(
        abs(request.priority) <= _MAX_PRIORITY,
        "priority",
        f"{request.priority} is not in [-{_MAX_PRIORITY}, {_MAX_PRIORITY}]",
    )
    salt_size = len(request.cache_salt.encode())
    checker.require(
        salt_size <= _MAX_SALT_BYTES,
        "cache_salt",
        f"has {salt_size} bytes, at most {_MAX_SALT_BYTES} are allowed",
    )
    _request_id(checker, request.request_id)
    resume = None
    if request.HasField("resume"):
        resume = check_resume(checker, request.resume, request.sampling, stop.max_tokens, model)
    checker.raise_if_any()
    assert prompt is not None
    seed = request.sampling.seed if request.sampling.HasField("seed") else None
    return GenerateCall(prompt, sampling, seed, stop, request.priority, request.cache_salt, resume)


def check_prompt(prompt: Prompt, token_ids: Sequence[int], stop: Stop, model: ServedModel) -> int:
    """Returns the most tokens to generate after a prompt of these tokens. Raises InvalidRequest."""
    checker = Checker()
    token_count = len(token_ids)
    _known_to_model(checker, prompt, token_ids, model)
    room = model.max_sequence_token_count - token_count
    checker.require(token_count > 0, prompt.field, "gives no tokens")
    checker.require(
        room > 0,
        prompt.field,
        f"has {token_count} tokens; the model's length is {model.max_sequence_token_count}, and one"
        " token must be left to generate",
    )
    if stop.max_tokens is not None and room > 0:
        checker.require(
            stop.max_tokens <= room,
            "stop.max_tokens",
            f"{stop.max_tokens} do not fit: the model's length is {model.max_sequence_token_count}"
            f" tokens, the prompt has {token_count}, which leaves {room}",
        )
    checker.raise_if_any()
    return room if stop.max_tokens is None else stop.max_tokens


def check_tokens(prompt: Prompt, token_ids: Sequence[int], model: ServedModel) -> None:
    """Checks that the model can take what the tokenizer has made. Raises InvalidRequest."""
    checker = Checker()
    _known_to_model(checker, prompt, token_ids, model)
    checker.raise_if_any()


def check_stop_strings(stop: Stop, can_write: Callable[[str], bool]) -> None:
    """Refuses those that could never be found. Raises InvalidRequest."""
    checker = Checker()
    for index, string in enumerate(stop.strings):
        checker.require(
            can_write(string), f"stop.strings[{index}]", "no tokens of the model give this text"
        )
    checker.raise_if_any()


def check_tokenize(request: inference_pb2.TokenizeRequest, model: ServedModel) -> TokenizeCall:
    """Checks what is to be tokenized. Raises InvalidRequest."""
    checker = Checker()
    _few_messages(checker, request.chat)
    checker.known_fields(request)
    prompt: TextPrompt | ChatPrompt | None = None
    match request.WhichOneof("input"):
        case "text":
            prompt = _text(checker, request.text, model)
        case "chat":
            prompt = _chat(checker, request.chat, model)
            checker.require(
                not request.omit_special_tokens,
                "omit_special_tokens",
                "a chat's template decides that",
            )
        case _:
            checker.require(False, "input", "one of text and chat is needed")
    checker.raise_if_any()
    assert prompt is not None
    return TokenizeCall(prompt, add_special_tokens=not request.omit_special_tokens)


def check_detokenize(
    request: inference_pb2.DetokenizeRequest, model: ServedModel
) -> tuple[int, ...]:
    """The token ids. Raises InvalidRequest."""
    checker = Checker()
    checker.known_fields(request)
    checker.require(len(request.token_ids) > 0, "token_ids", "is empty")
    within_length(checker, request.token_ids, "token_ids", model)
    checker.raise_if_any()  # a message may have millions: they are not looked at
    token_ids = tuple(request.token_ids)
    in_vocabulary(checker, token_ids, "token_ids", model)
    checker.raise_if_any()
    return token_ids


def check_empty(request: Message) -> None:
    """Checks a request that has no fields. Raises InvalidRequest."""
    checker = Checker()
    checker.known_fields(request)
    checker.raise_if_any()


def _text(checker: Checker, text: str, model: ServedModel) -> TextPrompt:
    _text_length(checker, len(text), "text", model)
    return TextPrompt(text)


def _token_prompt(checker: Checker, message: types_pb2.TokenIds, model: ServedModel) -> TokenPrompt:
    checker.known_fields(message, "token_ids.")
    checker.require(len(message.ids) > 0, "token_ids", "is empty")
    if not within_length(checker, message.ids, "token_ids", model):
        return TokenPrompt(array("I"))  # a message may have millions: they are not looked at
    token_ids = array("I", message.ids)
    in_vocabulary(checker, token_ids, "token_ids", model)
    return TokenPrompt(token_ids)


def _few_messages(checker: Checker, chat: inference_pb2.Chat) -> None:
    """Raises InvalidRequest at once for a chat of more messages than are looked at."""
    count = len(chat.messages)
    checker.require(
        count <= _MAX_MESSAGES,
        "chat.messages",
        f"has {count} messages, at most {_MAX_MESSAGES} are allowed",
    )
    checker.raise_if_any()


def _chat(checker: Checker, chat: inference_pb2.Chat, model: ServedModel) -> ChatPrompt:
    checker.known_fields(chat, "chat.")
    checker.require(len(chat.messages) > 0, "chat.messages", "is empty")
    turns = tuple(ChatMessage(message.role, message.content) for message in chat.messages)
    known = inference_pb2.Chat()
    known.CopyFrom(chat)
    known.DiscardUnknownFields()
    if known.ByteSize() < chat.ByteSize():
        for index, message in enumerate(chat.messages):
            checker.known_fields(message, f"chat.messages[{index}].")
    for index, turn in enumerate(turns):
        if not checker.require(turn.role != "", f"chat.messages[{index}].role", "is empty"):
            break  # one violation is enough: a chat may have thousands of messages
    length = sum(len(turn.role) + len(turn.content) for turn in turns)
    _text_length(checker, length, "chat.messages", model)
    return ChatPrompt(turns)


def _sampling(
    checker: Checker, message: types_pb2.SamplingParameters, defaults: SamplingParams
) -> SamplingParams:
    checker.known_fields(message, "sampling.")
    given = {field.name: value for field, value in message.ListFields()}
    for name, value in given.items():
        allowed = SAMPLING_RANGES[name]
        checker.require(
            value in allowed, f"sampling.{name}", f"{_number(value)} is not in {allowed}"
        )
    given.pop("seed", None)
    return replace(defaults, **given)


def _stop(checker: Checker, message: inference_pb2.StopConditions, model: ServedModel) -> Stop:
    checker.known_fields(message, "stop.")
    max_tokens = message.max_tokens if message.HasField("max_tokens") else None
    checker.require(max_tokens != 0, "stop.max_tokens", "0 is less than 1")
    if checker.require(
        len(message.strings) <= _MAX_STOP_STRINGS,
        "stop.strings",
        f"has {len(message.strings)} texts, at most {_MAX_STOP_STRINGS} are allowed",
    ):
        for index, string in enumerate(message.strings):
            path = f"stop.strings[{index}]"
            checker.require(string != "", path, "is empty")
            checker.require(
                len(string) <= _MAX_STOP_STRING_CHARACTERS,
                path,
                f"has {len(string)} characters, at most {_MAX_STOP_STRING_CHARACTERS} are allowed",
            )
    token_ids = message.token_ids[: _MAX_STOP_TOKENS + 1]
    if checker.require(
        len(token_ids) <= _MAX_STOP_TOKENS,
        "stop.token_ids",
        f"has {len(message.token_ids)} tokens, at most {_MAX_STOP_TOKENS} are allowed",
    ):
        in_vocabulary(checker, token_ids, "stop.token_ids", model)
    return Stop(
        max_tokens,
        tuple(message.strings[: _MAX_STOP_STRINGS + 1]),
        frozenset(token_ids),
        message.ignore_end_of_sequence,
    )


def _request_id(checker: Checker, request_id: str) -> None:
    if checker.require(
        len(request_id) <= MAX_REQUEST_ID_CHARACTERS,
        "request_id",
        f"has {len(request_id)} characters, at most {MAX_REQUEST_ID_CHARACTERS} are allowed",
    ):
        checker.require(
            request_id.isascii() and (request_id.isprintable() or not request_id),
            "request_id",
            "has a character that is not printable ASCII",
        )


def _known_to_model(
    checker: Checker, prompt: Prompt, token_ids: Sequence[int], model: ServedModel
) -> None:
    """The tokenizer may have tokens that were never trained: the model has no embedding of them."""
    if isinstance(prompt, TokenPrompt):
        return  # was checked already
    largest = max(token_ids, default=0)
    checker.require(
        largest < model.vocabulary_size,
        prompt.field,
        f"gives token {largest}, which the model's vocabulary of {model.vocabulary_size} tokens"
        " lacks",
    )


def _text_length(checker: Checker, length: int, field: str, model: ServedModel) -> None:
    limit = CHARACTERS_PER_TOKEN * model.max_sequence_token_count
    checker.require(
        length <= limit,
        field,
        f"has {length} characters; at most {limit} are looked at, as the model's length is"
        f" {model.max_sequence_token_count} tokens",
    )


def _number(value: float) -> str:
    # Nine digits tell any two floats of 32 bits apart: 100.00001 is not in [0, 100].
    return str(value) if isinstance(value, int) else f"{value:.9g}"

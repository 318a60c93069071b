"""Builds request messages from what callers say.

The server judges values. This module refuses only what no message can carry, as the server would.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from twinplane.client.options import GenerateOptions
from twinplane.client.values import Message, Prompt
from twinplane.common.v1 import types_pb2
from twinplane.common.v1.errors_pb2 import ERROR_REASON_INVALID_FIELD
from twinplane.errors import InvalidRequest, Violation
from twinplane.grpc.status import reason_name
from twinplane.inference.v1 import inference_pb2 as pb

_INTEGER_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The message of one generation. An option that is left out or None stays unset.

    Raises InvalidRequest, or TypeError (also for an option that does not exist).
    """
    if unknown := options.keys() - GenerateOptions.__optional_keys__:
        raise TypeError(f"generate() got an unexpected keyword argument {min(unknown)!r}")
    request = pb.GenerateRequest(
        model=_text("model", options.get("model", "")),
        sampling=_sampling(options),
        stop=pb.StopConditions(
            max_tokens=_optional_integer("stop.max_tokens", options.get("max_tokens"), 0, 32),
            strings=_stop_strings(options.get("stop", ())),
            token_ids=_token_ids("stop.token_ids", options.get("stop_token_ids", ())),
            ignore_end_of_sequence=options.get("ignore_eos", False),
        ),
        priority=_integer("priority", options.get("priority", 0), -(2**31), 31),
        cache_salt=_text("cache_salt", options.get("cache_salt", "")),
        request_id=_text("request_id", options.get("request_id", "")),
    )
    match _classify(prompt):
        case str(text):
            request.text = _text("text", text)
        case pb.Chat() as chat:
            request.chat.CopyFrom(chat)
        case list(token_ids):
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(_token_ids("token_ids.ids", token_ids))
    return request


def tokenize_request(
    text: str | Sequence[Message], *, model: str, add_special_tokens: bool
) -> pb.TokenizeRequest:
    """The message that asks for token ids. Raises InvalidRequest; TypeError for token ids."""
    request = pb.TokenizeRequest(model=_text("model", model))
    match _classify(text):
        case str(plain):
            request.text = _text("text", plain)
            request.omit_special_tokens = not add_special_tokens
        case pb.Chat() as chat:
            request.chat.CopyFrom(chat)
            request.omit_special_tokens = not add_special_tokens
        case list():
            raise TypeError("text must be a string or a sequence of Message")
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """The message that asks for a text. Raises InvalidRequest or TypeError."""
    return pb.DetokenizeRequest(
        model=_text("model", model),
        token_ids=_token_ids("token_ids", token_ids),
        keep_special_tokens=keep_special_tokens,
    )


def _classify(prompt: Prompt) -> str | pb.Chat | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, bytes | bytearray):
        raise TypeError("a prompt must be a string, token ids or messages, not bytes")
    items = list(prompt)
    if not items or not isinstance(items[0], Message):
        return [index(item) for item in items]  # type: ignore[arg-type]  # TypeError is the check
    chat = pb.Chat()
    for position, message in enumerate(items):
        if not isinstance(message, Message):
            raise TypeError(f"messages[{position}] is a {type(message).__name__}, not a Message")
        path = f"chat.messages[{position}]"
        chat.messages.add(
            role=_text(f"{path}.role", message.role),
            content=_text(f"{path}.content", message.content),
        )
    return chat


def _sampling(options: GenerateOptions) -> types_pb2.SamplingParameters:
    """The options that are sampling parameters: those that have the name of a field."""
    values: dict[str, Any] = {}
    for field in types_pb2.SamplingParameters.DESCRIPTOR.fields:
        value: Any = options.get(field.name)
        if value is not None and field.type in _INTEGER_BITS:
            value = _integer(f"sampling.{field.name}", value, 0, _INTEGER_BITS[field.type])
        values[field.name] = value
    return types_pb2.SamplingParameters(**values)


def _stop_strings(stop: Sequence[str]) -> list[str]:
    if isinstance(stop, str):
        raise TypeError("stop must be a sequence of strings, not one string")
    return [_text(f"stop.strings[{position}]", text) for position, text in enumerate(stop)]


def _token_ids(path: str, token_ids: Iterable[int]) -> list[int]:
    return [_integer(f"{path}[{at}]", token_id, 0, 32) for at, token_id in enumerate(token_ids)]


def _optional_integer(path: str, value: int | None, minimum: int, bits: int) -> int | None:
    return None if value is None else _integer(path, value, minimum, bits)


def _integer(path: str, value: int, minimum: int, bits: int) -> int:
    number = index(value)
    if not minimum <= number < 2**bits:
        raise _invalid(path, f"{number} is not in [{minimum}, 2^{bits})")
    return number


def _text(path: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _invalid(path, f"not Unicode text: {error.reason}") from error
    return value


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path}: {description}",
        reason=reason_name(ERROR_REASON_INVALID_FIELD),
        violations=(Violation(path, description),),
    )

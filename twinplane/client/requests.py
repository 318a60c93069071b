"""Builds request messages from what callers say.

The server judges values. Here is refused only what no message can carry, see arguments.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor

from twinplane.client import arguments
from twinplane.client.arguments import wrong_type
from twinplane.client.options import GenerateOptions
from twinplane.client.values import Message
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb

_INTEGER_BITS = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}
_A_PROMPT = "a string, token ids or messages"

_Request = TypeVar("_Request", pb.GenerateRequest, pb.CompleteRequest)


def generate_request(prompt: object, options: GenerateOptions) -> pb.GenerateRequest:
    """The message of one streamed generation. An option that is left out or None stays unset.

    Raises InvalidRequest, or TypeError (also for an option that does not exist).
    """
    return _generation_request(pb.GenerateRequest, prompt, options, "generate")


def complete_request(prompt: object, options: GenerateOptions) -> pb.CompleteRequest:
    """The same for a generation that is answered at once."""
    return _generation_request(pb.CompleteRequest, prompt, options, "complete")


def _generation_request(
    kind: type[_Request], prompt: object, options: GenerateOptions, caller: str
) -> _Request:
    if unknown := options.keys() - GenerateOptions.__optional_keys__:
        raise TypeError(f"{caller}() got an unexpected keyword argument {min(unknown)!r}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    stop = pb.StopConditions()
    if "max_tokens" in given:
        stop.max_tokens = arguments.integer(
            "max_tokens", "stop.max_tokens", given["max_tokens"], 0, 32
        )
    if "stop" in given:
        stop.strings.extend(
            arguments.text(f"stop[{at}]", f"stop.strings[{at}]", string)
            for at, string in enumerate(arguments.items("stop", "strings", given["stop"]))
        )
    if "stop_token_ids" in given:
        ids = arguments.items("stop_token_ids", "token ids", given["stop_token_ids"])
        stop.token_ids.extend(arguments.token_ids("stop_token_ids", "stop.token_ids", ids))
    if "ignore_eos" in given:
        stop.ignore_end_of_sequence = arguments.truth("ignore_eos", given["ignore_eos"])
    request = kind(sampling=_sampling(given), stop=stop)
    if "priority" in given:
        request.priority = arguments.integer(
            "priority", "priority", given["priority"], -(2**31), 31
        )
    for name in ("model", "adapter", "cache_salt", "request_id"):
        if name in given:
            setattr(request, name, arguments.text(name, name, given[name]))
    match _classify("prompt", prompt):
        case str(text):
            request.text = arguments.text("prompt", "text", text)
        case pb.Chat() as chat:
            request.chat.CopyFrom(chat)
        case list(items):
            request.token_ids.SetInParent()
            request.token_ids.ids.extend(arguments.token_ids("prompt", "token_ids.ids", items))
    return request


def tokenize_request(
    text: object, *, model: object, add_special_tokens: object
) -> pb.TokenizeRequest:
    """The message that asks for token ids. Raises InvalidRequest or TypeError."""
    request = pb.TokenizeRequest(model=_model(model))
    request.omit_special_tokens = not arguments.truth("add_special_tokens", add_special_tokens)
    match _classify("text", text):
        case str(plain):
            request.text = arguments.text("text", "text", plain)
        case pb.Chat() as chat:
            request.chat.CopyFrom(chat)
        case list():
            raise wrong_type("text", "a string or messages", text)
    return request


def detokenize_request(
    token_ids: object, *, model: object, keep_special_tokens: object
) -> pb.DetokenizeRequest:
    """The message that asks for a text. Raises InvalidRequest or TypeError."""
    items = arguments.items("token_ids", "token ids", token_ids)
    return pb.DetokenizeRequest(
        model=_model(model),
        token_ids=arguments.token_ids("token_ids", "token_ids", items),
        keep_special_tokens=arguments.truth("keep_special_tokens", keep_special_tokens),
    )


def _model(name: object) -> str:
    return "" if name is None else arguments.text("model", "model", name)


def _classify(argument: str, prompt: object) -> str | pb.Chat | list[Any]:
    """Tells text, messages and anything else apart; of the last only its items are known."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping | Message):
        kind = type(prompt).__name__
        raise TypeError(f"{argument} must be {_A_PROMPT}, not one {kind}: put messages in a list")
    try:
        items = arguments.items(argument, "token ids", prompt)
    except TypeError as error:
        raise wrong_type(argument, _A_PROMPT, prompt) from error
    if not items or not isinstance(items[0], Message | Mapping):
        return items
    chat = pb.Chat()
    for at, message in enumerate(items):
        role, content = _turn(f"{argument}[{at}]", message)
        path = f"chat.messages[{at}]"
        chat.messages.add(
            role=arguments.text(f"{argument}[{at}].role", f"{path}.role", role),
            content=arguments.text(f"{argument}[{at}].content", f"{path}.content", content),
        )
    return chat


def _turn(argument: str, message: object) -> tuple[object, object]:
    """A message's role and content, of whatever types they are."""
    if isinstance(message, Message):
        return message.role, message.content
    if not isinstance(message, Mapping):
        raise wrong_type(argument, "a Message or a mapping of role and content", message)
    for key in ("role", "content"):
        if key not in message:
            raise TypeError(f"{argument} has no {key!r}")
    for key in message:
        if key not in ("role", "content"):
            raise TypeError(f"{argument} has {key!r}; a message has a role and a content")
    return message["role"], message["content"]


def _sampling(given: Mapping[str, Any]) -> types_pb2.SamplingParameters:
    """The options that are sampling parameters: those that have the name of a field."""
    values: dict[str, Any] = {}
    for field in types_pb2.SamplingParameters.DESCRIPTOR.fields:
        name = field.name
        if name not in given:
            continue
        path = f"sampling.{name}"
        if field.type in _INTEGER_BITS:
            values[name] = arguments.integer(name, path, given[name], 0, _INTEGER_BITS[field.type])
        else:
            values[name] = arguments.real(name, path, given[name])
    return types_pb2.SamplingParameters(**values)

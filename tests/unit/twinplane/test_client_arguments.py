"""What callers hand in: a wrong type names its argument, and nothing is sent."""

from __future__ import annotations

import collections
import re
import types
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twinplane
from tests.support.client_callers import Call
from tests.support.scripted_inference import ScriptedInference, finished, started
from twinplane import AsyncClient, Client, GenerateOptions, Message
from twinplane.client.endpoint import checked_address
from twinplane.client.requests import (
    complete_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from twinplane.inference.v1 import inference_pb2 as pb

INTEGERS = ("max_tokens", "top_k", "seed", "priority")
NUMBERS = ("temperature", "top_p", "min_p")
TEXTS = ("model", "adapter", "cache_salt", "request_id")
SEQUENCES = ("stop", "stop_token_ids")
NOT_A_NUMBER: list[Any] = [
    "0",
    "",
    b"1",
    [1],
    {},
    True,
    1j,
    object,
    np.array([1, 2]),
    Message("a", "b"),
]
NOT_AN_INTEGER: list[Any] = [3.0, "3", b"3", [3], True, Decimal(3), 2.5, np.float32(3), object()]
NOT_A_TEXT: list[Any] = [b"m", 5, 1.5, ["m"], {}, Path("m"), True]
NOT_A_SEQUENCE: list[Any] = ["end", b"end", {"a": 1}, 5, 1.5, object(), True]
NOT_A_TRUTH: list[Any] = ["no", 0, 1, "", [], 0.0]

WRONG_OPTIONS = [
    *((name, value) for name in INTEGERS for value in NOT_AN_INTEGER),
    *((name, value) for name in NUMBERS for value in NOT_A_NUMBER),
    *((name, value) for name in TEXTS for value in NOT_A_TEXT),
    *((name, value) for name in SEQUENCES for value in NOT_A_SEQUENCE),
    *(("ignore_eos", value) for value in NOT_A_TRUTH),
]


def test_every_option_is_tried() -> None:
    assert {name for name, _ in WRONG_OPTIONS} == GenerateOptions.__optional_keys__


def shown(value: object) -> str:
    """A value in a test's name: without its address, which differs between pytest's processes."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))[:40]


@pytest.mark.parametrize("build", [generate_request, complete_request])
@pytest.mark.parametrize(("name", "value"), WRONG_OPTIONS, ids=shown)
def test_a_wrong_type_names_its_option(name: str, value: Any, build: Callable[..., Any]) -> None:
    options: Any = {name: value}
    with pytest.raises(TypeError, match=rf"^{name} must be .*, not {type(value).__name__}"):
        build("x", options)


@pytest.mark.parametrize("name", sorted(GenerateOptions.__optional_keys__))
def test_none_is_as_good_as_nothing(name: str) -> None:
    options: Any = {name: None}
    assert generate_request("x", options) == generate_request("x", {})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stop": ["ok", 5]}, "stop[1] must be a string, not int"),
        ({"stop": [None]}, "stop[0] must be a string, not NoneType"),
        ({"stop": [["a"]]}, "stop[0] must be a string, not list"),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids[1] must be an integer, not float"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1] must be an integer, not str"),
        ({"stop_token_ids": [None]}, "stop_token_ids[0] must be an integer, not NoneType"),
    ],
)
def test_a_wrong_item_is_named_with_its_place(options: Any, named: str) -> None:
    with pytest.raises(TypeError) as caught:
        generate_request("x", options)
    assert str(caught.value) == named


HI = {"role": "user", "content": "hi"}
WRONG_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt must be a string, token ids or messages, not NoneType"),
    (5, "prompt must be a string, token ids or messages, not int"),
    (1.5, "prompt must be a string, token ids or messages, not float"),
    (b"text", "prompt must be a string, token ids or messages, not bytes"),
    (bytearray(b"text"), "prompt must be a string, token ids or messages, not bytearray"),
    (memoryview(b"text"), "prompt must be a string, token ids or messages, not memoryview"),
    (Path("text"), "prompt must be a string, token ids or messages, not PosixPath"),
    (HI, "prompt must be a string, token ids or messages, not one dict: put messages in a list"),
    (Message("user", "hi"), "prompt must be a string, token ids or messages, not one Message"),
    ([1, "two"], "prompt[1] must be an integer, not str"),
    (["text"], "prompt[0] must be an integer, not str"),
    ([1, None], "prompt[1] must be an integer, not NoneType"),
    ([1.5], "prompt[0] must be an integer, not float"),
    ([True], "prompt[0] must be an integer, not bool"),
    ([[1, 2]], "prompt[0] must be an integer, not list"),
    ([1, HI], "prompt[1] must be an integer, not dict"),
    ([HI, 5], "prompt[1] must be a Message or a mapping of role and content, not int"),
    ([HI, "hi"], "prompt[1] must be a Message or a mapping of role and content, not str"),
    ([Message("user", "x"), None], "prompt[1] must be a Message or a mapping"),
    ([{}], "prompt[0] has no 'role'"),
    ([{"role": "user"}], "prompt[0] has no 'content'"),
    ([HI, {"content": "x"}], "prompt[1] has no 'role'"),
    ([{**HI, "name": "me"}], "prompt[0] has 'name'; a message has a role and a content"),
    ([{**HI, 5: "me"}], "prompt[0] has 5; a message has a role and a content"),
    ([{"role": None, "content": "x"}], "prompt[0].role must be a string, not NoneType"),
    ([{"role": "user", "content": None}], "prompt[0].content must be a string, not NoneType"),
    ([{"role": "user", "content": [{}]}], "prompt[0].content must be a string, not list"),
    ([HI, Message("user", 5)], "prompt[1].content must be a string, not int"),  # type: ignore[arg-type]
    ([Message(b"user", "x")], "prompt[0].role must be a string, not bytes"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "named"), WRONG_PROMPTS, ids=shown)
def test_a_wrong_prompt_says_what_is_wrong(prompt: Any, named: str) -> None:
    for build in (generate_request, complete_request):
        with pytest.raises(TypeError) as caught:
            build(prompt, {})
        assert str(caught.value).startswith(named)
    if not (isinstance(prompt, list) and not isinstance(prompt[0], dict | Message)):
        with pytest.raises(TypeError, match=r"^text"):
            tokenize_request(prompt, model="", add_special_tokens=True)


@pytest.mark.parametrize(
    "conversation",
    [
        [HI],
        (HI,),
        [Message("user", "hi")],
        iter([HI]),
        [types.MappingProxyType(HI)],
        [collections.OrderedDict(HI)],
        [collections.ChainMap(HI)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_messages_are_values_or_mappings(conversation: Any) -> None:
    expected = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert generate_request(conversation, {}).chat == expected


def test_messages_may_be_mixed(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", [Message("system", "Be brief."), HI])
    assert call("tokenize", [HI]) == (1, 2, 3)
    generated, tokenized = service.requests
    assert [turn.role for turn in generated.chat.messages] == ["system", "user"]
    assert tokenized.chat.messages[0].content == "hi"


def test_numbers_of_other_libraries_are_numbers() -> None:
    options: Any = {
        "temperature": np.float32(0.5), "top_p": Decimal("0.5"), "min_p": np.float64(0.25),
        "top_k": np.int32(3), "seed": np.uint64(2**64 - 1), "stop_token_ids": np.array([1, 2]),
        "max_tokens": np.int64(4), "temperature_": 0,
    }  # fmt: skip
    del options["temperature_"]
    request = generate_request(np.array([5, 6]), options)
    assert list(request.token_ids.ids) == [5, 6]
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 2**64 - 1)
    assert generate_request("x", {"temperature": 1}).sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 10**5000}, "stop.max_tokens"),
        ({"seed": -(10**5000)}, "sampling.seed"),
        ({"temperature": 10**400}, "sampling.temperature"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
    ],
    ids=["max_tokens", "seed", "temperature", "cache_salt"],
)
def test_what_no_field_holds_is_an_invalid_request(options: Any, field: str) -> None:
    with pytest.raises(twinplane.InvalidRequest) as caught:
        generate_request("x", options)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize(
    ("method", "arguments", "keywords", "named"),
    [
        ("tokenize", ["x"], {"model": 5}, "model must be"),
        ("tokenize", ["x"], {"add_special_tokens": "no"}, "add_special_tokens must be"),
        ("tokenize", [None], {}, "text must be"),
        ("tokenize", [[1, 2]], {}, "text must be a string or messages, not list"),
        ("detokenize", ["12"], {}, "token_ids must be a sequence of token ids, not str"),
        ("detokenize", [5], {}, "token_ids must be"),
        ("detokenize", [None], {}, "token_ids must be"),
        ("detokenize", [[1, 2.0]], {}, r"token_ids\[1\] must be an integer"),
        ("detokenize", [[1]], {"keep_special_tokens": None}, "keep_special_tokens must be"),
        ("list_models", [], {"timeout": "5"}, "timeout must be a number, not str"),
        ("list_workers", [], {"timeout": "5"}, "timeout must be a number, not str"),
        ("generate", ["x"], {"timeout": [5]}, "timeout must be"),
        ("complete", ["x"], {"timeout": True}, "timeout must be"),
        ("health", [], {"timeout": "5"}, "timeout must be"),
        ("wait_ready", ["5"], {}, "timeout must be"),
    ],
)
def test_other_methods_name_their_arguments(
    call: Call, service: ScriptedInference, method: str, arguments: Any, keywords: Any, named: str
) -> None:
    with pytest.raises(TypeError, match=f"^{named}"):
        call(method, *arguments, **keywords)
    assert service.requests == []


def test_detokenize_takes_what_is_an_integer() -> None:
    request = detokenize_request(np.array([1, 2]), model=None, keep_special_tokens=False)
    assert list(request.token_ids) == [1, 2]


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"address": 5}, TypeError, "address must be a string, not int"),
        ({"address": None}, TypeError, "address must be"),
        ({"address": b"127.0.0.1:1"}, TypeError, "address must be"),
        ({"credentials": "ca.pem"}, TypeError, "credentials must be TlsCredentials, not str"),
        ({"credentials": True}, TypeError, "credentials must be"),
        ({"timeout": "5"}, TypeError, "timeout must be"),
        ({"timeout": float("nan")}, ValueError, "timeout must be"),
        ({"retry": 3}, TypeError, "retry must be a RetryPolicy, not int"),
        ({"metadata": "Bearer x"}, TypeError, "metadata must be a mapping"),
        ({"metadata": [("a", "b")]}, TypeError, "metadata must be"),
        ({"metadata": {5: "x"}}, TypeError, "a name in metadata must be"),
        ({"metadata": {"authorization": None}}, TypeError, r"metadata\['authorization'\] must be"),
        ({"metadata": {"authorization": b"x"}}, TypeError, r"metadata\['authorization'\] must be"),
        ({"metadata": {"x-bin": "text"}}, TypeError, r"metadata\['x-bin'\] must be bytes"),
        ({"metadata": {"a b": "x"}}, ValueError, r"metadata\['a b'\]"),
        ({"metadata": {"": "x"}}, ValueError, r"metadata\[''\]"),
        ({"metadata": {"grpc-timeout": "1S"}}, ValueError, r"metadata\['grpc-timeout'\]"),
        ({"metadata": {"a": "secret\n"}}, ValueError, r"metadata\['a'\]"),
        ({"metadata": {"a": "sécret"}}, ValueError, r"metadata\['a'\]"),
    ],
    ids=shown,
)
def test_settings_are_checked_when_a_client_is_made(
    client: Callable[..., object], settings: Any, error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=f"^{named}") as caught:
        client(**settings)
    assert "secret" not in str(caught.value)
    assert "sécret" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("http://127.0.0.1:50051", "give 127.0.0.1:50051"),
        ("https://gpu.example:443/v1", "give gpu.example:443 and credentials for TLS"),
        ("grpc://localhost:50051", "give localhost:50051"),
        ("tcp://x", "is a URL"),
        ("127.0.0.1", "has no port: give 127.0.0.1:50051"),
        ("localhost", "has no port"),
        ("[::1]", "has no port"),
        ("::1", "give [host]:port"),
        ("fe80::1:50051", "give [host]:port"),
        ("localhost:", "not host:port"),
        ("localhost:http", "not host:port"),
        ("localhost:0", "not host:port"),
        ("localhost:65536", "not host:port"),
        ("localhost:" + "9" * 5_000, "not host:port"),
        ("localhost:-1", "not host:port"),
        ("localhost:٥٠", "not host:port"),
        ("localhost:50051/v1", "not host:port"),
        (":50051", "has no host: give 127.0.0.1:50051"),
        ("", "not host:port"),
        ("  ", "not host:port"),
        ("local host:50051", "not host:port"),
        ("localhost:50051\n", "not host:port"),
        ("/run/twinplane.sock", "is a path: give unix:/run/twinplane.sock"),
        ("unix:", "names nothing"),
        ("unix://", "names nothing"),
        ("dns:///", "names nothing"),
    ],
)
def test_an_address_that_is_none_says_what_to_write(address: str, advice: str) -> None:
    for error in (twinplane.InvalidAddress, ValueError, twinplane.TwinplaneError):
        with pytest.raises(error) as caught:
            Client(address)
        assert advice in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50051", "localhost:1", "gpu-7.example.com:65535", "[::1]:50051",
        "[fe80::1%eth0]:50051", "unix:/tmp/a b.sock", "unix:relative.sock", "unix:///tmp/x.sock",
        "unix-abstract:name", "dns:///control.svc:50051", "dns:control.svc", "ipv4:10.0.0.1:50051",
        "ipv6:[::1]:50051",
    ],
)  # fmt: skip
def test_an_address_that_grpc_takes_is_taken(address: str) -> None:
    assert checked_address(address) == address

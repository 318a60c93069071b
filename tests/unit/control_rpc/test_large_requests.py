"""Requests of the largest size, made to be slow to look at: the loop goes on meanwhile.

What looking costs is compared with what parsing the same message costs: each is walked a few times
at most, by the library, and never element by element.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from google.protobuf.message import Message

from control_plane.rpc.errors import InvalidRequest, UnknownModel
from control_plane.rpc.validation import (
    check_detokenize,
    check_empty,
    check_generate,
    check_model,
    check_tokenize,
)
from control_plane.shell.engine import ServedModel
from tests.support.edge_rig import MODEL
from tests.support.malformed import field
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb

LONG = replace(MODEL, max_sequence_token_count=131_072)
UNKNOWN = b"\xa0\x3f\x01" * 1_300_000
SIZE = 4_000_000
TIMES_PARSING = 8.0
TEXT = field(pb.GenerateRequest, "text", b"a")


def generate(name: str, content: bytes) -> tuple[type[Message], bytes]:
    return pb.GenerateRequest, TEXT + field(pb.GenerateRequest, name, content)


def stop(name: str, content: bytes, count: int = 1) -> tuple[type[Message], bytes]:
    return generate("stop", field(pb.StopConditions, name, content) * count)


IDS = field(types_pb2.TokenIds, "ids", b"\x01" * SIZE)
LARGE: dict[str, tuple[type[Message], bytes]] = {
    "unknown fields": (pb.GenerateRequest, TEXT + UNKNOWN),
    "unknown fields of stop": generate("stop", UNKNOWN),
    "unknown fields of sampling": generate("sampling", UNKNOWN),
    "unknown fields of token ids": (
        pb.GenerateRequest,
        field(pb.GenerateRequest, "token_ids", UNKNOWN),
    ),
    "unknown fields of nothing": (pb.ListModelsRequest, UNKNOWN),
    "unknown fields to tokenize": (pb.TokenizeRequest, UNKNOWN),
    "unknown fields to detokenize": (pb.DetokenizeRequest, UNKNOWN),
    "tokens": (pb.GenerateRequest, field(pb.GenerateRequest, "token_ids", IDS)),
    "tokens to detokenize": (
        pb.DetokenizeRequest,
        field(pb.DetokenizeRequest, "token_ids", b"\x01" * SIZE),
    ),
    "stop tokens": stop("token_ids", b"\x01" * SIZE),
    "stop texts": stop("strings", b"", SIZE // 2),
    "a stop text": stop("strings", b"a" * SIZE),
    "a request id": generate("request_id", b"a" * SIZE),
    "a request id of other characters": generate("request_id", "é".encode() * (SIZE // 2)),
    "a model's name": generate("model", b"a" * SIZE),
    "a cache salt": generate("cache_salt", b"a" * SIZE),
    "messages": generate("chat", field(pb.Chat, "messages", b"") * (SIZE // 2)),
    "unknown fields of messages": generate(
        "chat", field(pb.Chat, "messages", b"\x0a\x01u\xa0\x3f\x01") * 400_000
    ),
    "messages to tokenize": (
        pb.TokenizeRequest,
        field(pb.TokenizeRequest, "chat", field(pb.Chat, "messages", b"\x0a\x01u") * 800_000),
    ),
    "a text to tokenize": (pb.TokenizeRequest, field(pb.TokenizeRequest, "text", b"a" * SIZE * 2)),
}
CHECKS: dict[type[Message], Callable[[object, ServedModel], object]] = {
    pb.GenerateRequest: check_generate,  # type: ignore[dict-item]
    pb.TokenizeRequest: check_tokenize,  # type: ignore[dict-item]
    pb.DetokenizeRequest: check_detokenize,  # type: ignore[dict-item]
    pb.ListModelsRequest: lambda request, model: check_empty(request),  # type: ignore[arg-type]
}


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the calling thread: others do not count."""
    started = time.thread_time()
    work()
    return time.thread_time() - started


@pytest.mark.parametrize("name", LARGE)
def test_looking_at_a_large_request_takes_no_longer_than_parsing_it(name: str) -> None:
    kind, raw = LARGE[name]
    message = kind.FromString(raw)

    def check() -> None:
        with pytest.raises((InvalidRequest, UnknownModel)):
            check_model(getattr(message, "model", ""), LONG)
            CHECKS[kind](message, LONG)

    looking = seconds(check)
    # The floor is for messages that are one text: they are parsed by a single copy.
    parsing = max(0.005, seconds(lambda: kind.FromString(raw)))
    assert looking < TIMES_PARSING * parsing


def test_unknown_fields_of_a_large_request_are_still_refused() -> None:
    raw = field(pb.GenerateRequest, "text", b"a" * 100_000) + b"\xa0\x3f\x01"
    with pytest.raises(InvalidRequest, match="GenerateRequest: has fields that are not known"):
        check_generate(pb.GenerateRequest.FromString(raw), LONG)
    check_generate(pb.GenerateRequest.FromString(raw[:-3]), LONG)

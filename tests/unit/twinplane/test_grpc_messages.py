"""Bytes as messages: which field is to blame, and how far a compressed message is unpacked."""

from __future__ import annotations

import gzip
import time
import tracemalloc
import zlib

import pytest

from tests.support.malformed import field, varint
from twinplane.grpc.messages import (
    MalformedMessage,
    MessageError,
    MessageTooLarge,
    parse,
    unpacked,
)
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.worker.v1 import model_runner_pb2

BAD_TEXT = b"\xff\xfe"
LIMIT = 1 << 20
GENERATE = pb.GenerateRequest(text="hi", request_id="a", stop=pb.StopConditions(strings=["x"]))


def blamed(raw: bytes, deserializer: object = pb.GenerateRequest.FromString) -> str:
    with pytest.raises(MalformedMessage) as error:
        parse(raw, deserializer)  # type: ignore[arg-type]
    return error.value.field


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        (field(pb.GenerateRequest, "text", BAD_TEXT), "text"),
        (field(pb.GenerateRequest, "request_id", BAD_TEXT), "request_id"),
        (field(pb.GenerateRequest, "model", b"a")
         + field(pb.GenerateRequest, "cache_salt", b"\x80"), "cache_salt"),
        (field(pb.GenerateRequest, "stop", field(pb.StopConditions, "strings", b"ok")
               + field(pb.StopConditions, "strings", b"\xc3")), "stop.strings[1]"),
        (field(pb.GenerateRequest, "chat", field(pb.Chat, "messages", b"") * 3
               + field(pb.Chat, "messages", field(pb.ChatMessage, "content", BAD_TEXT))),
         "chat.messages[3].content"),
        (field(pb.GenerateRequest, "token_ids", field(pb.GenerateRequest, "model", b"")[:1]),
         "token_ids"),
    ],
)  # fmt: skip
def test_the_field_to_blame_is_named(raw: bytes, path: str) -> None:
    assert blamed(raw) == path


@pytest.mark.parametrize(
    "raw",
    [b"\x00", b"\x0b", b"\x0b" * 10_000, b"\xff" * 11, GENERATE.SerializeToString()[:-1]],
    ids=["field 0", "open group", "deep groups", "huge number", "cut short"],
)
def test_a_message_that_is_broken_as_a_whole_blames_no_field_of_its_own(raw: bytes) -> None:
    assert blamed(raw) in ("", "stop", "request_id")


def test_the_search_for_the_field_is_bounded() -> None:
    fine = field(pb.GenerateRequest, "model", b"a")
    started = time.process_time()
    assert blamed(fine * 300_000 + b"\x07") == ""
    searched = time.process_time() - started
    started = time.process_time()
    parse(fine * 300_000, pb.GenerateRequest.FromString)
    assert searched < 20 * (time.process_time() - started), "of the order of parsing it"


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_what_is_compressed_is_unpacked(compress: object) -> None:
    packed = compress(GENERATE.SerializeToString() * 100)  # type: ignore[operator]
    merged = parse(unpacked(packed, LIMIT), pb.GenerateRequest.FromString)
    assert (merged.text, len(merged.stop.strings)) == ("hi", 100)
    exact = compress(bytes(LIMIT))  # type: ignore[operator]
    assert len(unpacked(exact, LIMIT)) == LIMIT


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_what_unpacks_to_more_than_a_message_is_not_unpacked(compress: object) -> None:
    packed = compress(bytes(100 * LIMIT))  # type: ignore[operator]
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge, match=str(LIMIT)):
            parse(unpacked(packed, LIMIT), pb.GenerateRequest.FromString)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()


def test_what_only_begins_like_something_compressed_is_malformed() -> None:
    packed = gzip.compress(GENERATE.SerializeToString())
    for raw in (b"\x1f\x8b", packed[:-9], packed[:5] + b"\xff" + packed[6:-9]):
        with pytest.raises(MessageError):
            parse(unpacked(raw, LIMIT), pb.GenerateRequest.FromString)


def test_no_message_that_a_server_takes_begins_like_something_compressed() -> None:
    """A zlib header's first byte is that of a number in field 15; a gzip's is no field's."""
    for file in (pb, model_runner_pb2):
        for kind in file.DESCRIPTOR.message_types_by_name.values():
            assert kind.name.endswith("Response") or 15 not in kind.fields_by_number
    assert inference_pb2_grpc  # the services whose requests these are
    assert varint(15 << 3) == b"\x78"


def test_without_a_deserializer_the_bytes_are_the_message() -> None:
    assert parse(b"\x07", None) == b"\x07"

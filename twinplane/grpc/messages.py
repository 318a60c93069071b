"""A message's bytes as a message: unpacked within bounds, and parsed.

MessageError
├── NoMessage         the call brought none, or it was not there in time
├── MessageTooLarge   it unpacks to more than a message may have
└── MalformedMessage  its bytes are no message of the kind: names the field, where one is to blame
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_MAX_SEARCHED_FIELDS = 1_000
_MAX_SEARCHED_DEPTH = 10
_LENGTH_DELIMITED = 2
_FIXED_SIZES = {1: 8, 5: 4}


class MessageError(Exception):
    """What came is not a message that can be looked at."""


class NoMessage(MessageError):
    """The call has no message."""


class MessageTooLarge(MessageError):
    """A compressed message has more in it than a message may have."""


class MalformedMessage(MessageError):
    """The bytes can't be parsed. `field` is the path of the field to blame; empty: not known."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def parse(raw: bytes, deserializer: Callable[[bytes], Any] | None) -> Any:
    """The message that `raw` is. Raises MalformedMessage.

    Without a deserializer, the bytes themselves are the message.
    """
    if deserializer is None:
        return raw
    try:
        return deserializer(raw)
    except DecodeError as error:
        kind = getattr(deserializer, "__self__", None)
        descriptor = getattr(kind, "DESCRIPTOR", None)
        if not isinstance(kind, type) or descriptor is None:
            raise MalformedMessage("the bytes are not a message", "") from error
        field = _field_to_blame(raw, kind) or ""
        where = f", in the field {field}" if field else ""
        message = f"the bytes are not a {descriptor.full_name}{where}"
        raise MalformedMessage(message, field) from error


def unpacked(raw: bytes, max_bytes: int) -> bytes:
    """`raw`, or what it holds if it was compressed by gzip or deflate. Raises MessageTooLarge.

    What is compressed says so in its first two bytes. No message of ours begins with them: the
    first would be field 3 of a wire type that does not exist, or a number in field 15. At most a
    byte more than `max_bytes` is ever unpacked.
    """
    if not (raw[:2] == b"\x1f\x8b" or (raw[:1] == b"\x78" and _is_zlib_header(raw[:2]))):
        return raw
    unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        content = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error:
        return raw  # whatever it is, the parser says
    if len(content) > max_bytes:
        raise MessageTooLarge(f"the message unpacks to more than {max_bytes} bytes")
    return content if unpacker.eof else raw


def _is_zlib_header(header: bytes) -> bool:
    return len(header) == 2 and int.from_bytes(header) % 31 == 0


def _field_to_blame(raw: bytes, kind: type[Message], depth: int = 0) -> str | None:
    """The path of the first field that can't be parsed by itself; None: not found.

    The search is bounded: it runs on the event loop, for whatever anybody sends.
    """
    seen: dict[int, int] = {}
    start = 0
    for _ in range(_MAX_SEARCHED_FIELDS):
        if start >= len(raw):
            return None
        bounds = _field_at(raw, start)
        if bounds is None:
            return None
        number, wire_type, content, end = bounds
        position = seen[number] = seen.get(number, -1) + 1
        try:
            kind.FromString(raw[start:end])
        except DecodeError:
            field = kind.DESCRIPTOR.fields_by_number.get(number)
            if field is None:
                return None
            path = f"{field.name}[{position}]" if field.is_repeated else field.name
            inner = None
            if (
                field.type == FieldDescriptor.TYPE_MESSAGE
                and wire_type == _LENGTH_DELIMITED
                and depth < _MAX_SEARCHED_DEPTH
            ):
                assert field.message_type is not None
                inner_kind = GetMessageClass(field.message_type)  # type: ignore[arg-type]
                inner = _field_to_blame(raw[content:end], inner_kind, depth + 1)
            return path if inner is None else f"{path}.{inner}"
        start = end
    return None


def _field_at(raw: bytes, start: int) -> tuple[int, int, int, int] | None:
    """Number, wire type, start of the content and end of the field at `start`.

    None: there is no whole field, or one that is not to be measured, i.e. a group.
    """
    tag = _varint_at(raw, start)
    if tag is None:
        return None
    key, content = tag
    number, wire_type = key >> 3, key & 7
    end: int
    match wire_type:
        case 0:
            value = _varint_at(raw, content)
            if value is None:
                return None
            end = value[1]
        case 2:
            length = _varint_at(raw, content)
            if length is None:
                return None
            content = length[1]
            end = content + length[0]
        case 1 | 5:
            end = content + _FIXED_SIZES[wire_type]
        case _:
            return None
    return (number, wire_type, content, end) if end <= len(raw) else None


def _varint_at(raw: bytes, start: int) -> tuple[int, int] | None:
    """A number and its end; None: there is none of at most ten bytes."""
    value = 0
    for offset, byte in enumerate(raw[start : start + 10]):
        value |= (byte & 0x7F) << 7 * offset
        if byte < 0x80:
            return value, start + offset + 1
    return None

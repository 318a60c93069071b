"""Messages that no serializer makes: fields by hand, and many ways to break a message."""

from __future__ import annotations

import random
from collections.abc import Iterator

from google.protobuf.message import DecodeError, Message


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def field(kind: type[Message], name: str, content: bytes) -> bytes:
    """A field of any content, as bytes with their length."""
    number: int = kind.DESCRIPTOR.fields_by_name[name].number
    return varint(number << 3 | 2) + varint(len(content)) + content


def broken(whole: bytes, kind: type[Message], count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of the message `whole` that can't be parsed, no two of them alike."""
    rng = random.Random(seed)
    seen: set[bytes] = set()
    while len(seen) < count:
        variant = _mutated(whole, rng)
        if variant not in seen and _is_malformed(variant, kind):
            seen.add(variant)
            yield variant


def _mutated(whole: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(whole) + 1)
    match rng.randrange(8):
        case 0:
            return whole[:at]
        case 1:
            return whole[:at] + bytes((rng.randrange(256),)) + whole[at:]
        case 2:
            return whole[:at] + rng.randbytes(rng.randrange(1, 9)) + whole[at + 1 :]
        case 3:
            return whole + b"\x0b" * rng.choice((1, 99, 101, 10_000))
        case 4:
            return whole + b"\xff" * rng.randrange(10, 20)
        case 5:
            return whole + varint(rng.randrange(8)) + whole  # field 0
        case 6:
            return whole + varint(rng.randrange(1, 9) << 3 | 2) + varint(2**31 + rng.randrange(9))
        case _:
            text = rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"))
            return whole.replace(b"text", text)


def _is_malformed(raw: bytes, kind: type[Message]) -> bool:
    try:
        kind.FromString(raw)
    except DecodeError:
        return True
    return False

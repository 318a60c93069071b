"""Frames on a pipe: a length of four bytes, big-endian, then that many bytes of JSON.

Both ends speak JSON and nothing richer: reading a frame can build values, but never run code.
"""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct(">I")


class FrameTooLong(Exception):
    """The other end announced a frame of more bytes than this end accepts."""


def write_frame(stream: IO[bytes], body: bytes) -> None:
    """Writes one frame and flushes it. Raises OSError when the other end is gone."""
    stream.write(_LENGTH.pack(len(body)))
    stream.write(body)
    stream.flush()


def read_frame(stream: IO[bytes], max_bytes: int) -> bytes | None:
    """The next frame's body; None when the other end closed, also in the middle of a frame.

    Raises FrameTooLong before the body is read.
    """
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    [length] = _LENGTH.unpack(header)
    if length > max_bytes:
        raise FrameTooLong
    body = stream.read(length)
    return body if len(body) == length else None

"""Checks what callers hand in, so that a wrong type names its argument.

TypeError: a value of another type. InvalidRequest: a value of the right type that no message can
carry; its violation names the field, as the server would. The server judges everything else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any

from twinplane.common.v1.errors_pb2 import ERROR_REASON_INVALID_FIELD
from twinplane.errors import InvalidRequest, Violation
from twinplane.grpc.status import reason_name

Metadata = tuple[tuple[str, str | bytes], ...]

_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_BINARY_SUFFIX = "-bin"


def text(argument: str, field: str, value: Any) -> str:
    """A string that can be sent."""
    if not isinstance(value, str):
        raise wrong_type(argument, "a string", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _invalid(field, f"not Unicode text: {error.reason}") from error
    return value


def truth(argument: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise wrong_type(argument, "True or False", value)
    return value


def integer(argument: str, field: str, value: Any, minimum: int, bits: int) -> int:
    """An integer from `minimum` to 2^bits - 1; numpy's integers too."""
    number = _index(argument, value)
    if not minimum <= number < 2**bits:
        raise _invalid(field, f"{_shown(number)} is not in [{minimum}, 2^{bits})")
    return number


def real(argument: str, field: str, value: Any) -> float:
    """A number as a float; numpy's numbers too."""
    is_number = hasattr(type(value), "__float__") or hasattr(type(value), "__index__")
    if isinstance(value, bool) or not is_number:
        raise wrong_type(argument, "a number", value)
    try:
        return float(value)
    except OverflowError as error:
        raise _invalid(field, "the number is too large") from error
    except (TypeError, ValueError) as error:  # an array of several numbers, say
        raise wrong_type(argument, "a number", value) from error


def items(argument: str, what: str, value: Any) -> list[Any]:
    """The elements of a sequence of `what`; a text or a mapping is none."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping):
        raise wrong_type(argument, f"a sequence of {what}", value)
    try:
        return list(value)
    except TypeError as error:
        raise wrong_type(argument, f"a sequence of {what}", value) from error


def token_ids(argument: str, field: str, values: Iterable[Any]) -> list[int]:
    """Token ids that fit their field."""
    return [
        integer(f"{argument}[{at}]", f"{field}[{at}]", value, 0, 32)
        for at, value in enumerate(values)
    ]


def seconds(argument: str, value: Any) -> float | None:
    """A bound in seconds; None, and infinity, is none. Raises ValueError for NaN too."""
    if value is None:
        return None
    number = real(argument, argument, value)
    if math.isnan(number):
        raise ValueError(f"{argument} must be a number of seconds, not NaN")
    return None if number == math.inf else number


def metadata(value: Any) -> Metadata:
    """Pairs that a call can carry. Raises TypeError or ValueError; never quotes a value."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise wrong_type("metadata", "a mapping of names to texts", value)
    return tuple(_pair(name, content) for name, content in value.items())


def wrong_type(argument: str, expected: str, value: Any) -> TypeError:
    """The error for an argument of another type."""
    return TypeError(f"{argument} must be {expected}, not {type(value).__name__}")


def _pair(name: Any, content: Any) -> tuple[str, str | bytes]:
    if not isinstance(name, str):
        raise wrong_type("a name in metadata", "a string", name)
    name = name.lower()
    argument = f"metadata[{name!r}]"
    if not _METADATA_KEY.fullmatch(name) or name.startswith("grpc-"):
        raise ValueError(
            f"{argument}: a name has letters, digits and - _ . and does not begin with grpc-"
        )
    if name.endswith(_BINARY_SUFFIX):
        if not isinstance(content, bytes):
            raise wrong_type(argument, "bytes, as its name ends in -bin", content)
        return name, content
    if not isinstance(content, str):
        raise wrong_type(argument, "a string", content)
    if not (content.isascii() and (content.isprintable() or not content)):
        raise ValueError(f"{argument}: a text in metadata is printable ASCII")
    return name, content


def _index(argument: str, value: Any) -> int:
    if isinstance(value, bool):
        raise wrong_type(argument, "an integer", value)
    try:
        return index(value)
    except TypeError as error:
        raise wrong_type(argument, "an integer", value) from error


def _shown(number: int) -> str:
    # Python refuses to write integers of thousands of digits.
    return str(number) if number.bit_length() <= 256 else "the number"


def _invalid(field: str, description: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field}: {description}",
        reason=reason_name(ERROR_REASON_INVALID_FIELD),
        violations=(Violation(field, description),),
    )

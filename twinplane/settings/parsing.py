"""What a setting's text or TOML value means, by the setting's type."""

from __future__ import annotations

import re
import types
from decimal import Decimal
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from twinplane.paths import expand

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})


def plain_type(annotation: Any) -> Any:
    """`X | None` as X; anything else as it is."""
    if get_origin(annotation) in (Union, types.UnionType):
        plain = [arm for arm in get_args(annotation) if arm is not type(None)]
        assert len(plain) == 1, annotation
        return plain[0]
    return annotation


def joined(value: object) -> object:
    """A list of texts, as the file may have it, with spaces between; anything else as it is."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return " ".join(value)
    return value


def parse_as(kind: Any, value: object, *, sized: bool) -> object:
    """Raises ValueError with what was expected."""
    if kind is bool:
        return _parse_bool(value)
    if kind is str and isinstance(value, str):
        return value
    if kind is Path and isinstance(value, str) and value:
        return Path(expand(value))
    if kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _parse_size(value) if sized else _parse_number(int, value, "a whole number")
        raise ValueError("is not a size such as 512MiB" if sized else "is not a whole number")
    if kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            return _parse_number(float, value, "a number")
        raise ValueError("is not a number")
    assert kind in (str, Path), f"settings can't be of type {kind}"
    raise ValueError("is not text" if kind is str else "is not a path")


def _parse_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE:
        return True
    if isinstance(value, str) and value.lower() in _FALSE:
        return False
    raise ValueError("is neither true nor false")


def _parse_number(kind: type[int] | type[float], text: str, expected: str) -> int | float:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"is not {expected}") from error


def _parse_size(text: str) -> int:
    """Bytes: `4096`, `512MiB`, `1.5GB` (powers of 1024 with an i, of 1000 without)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("is not a size such as 512MiB")
    unit = match[2].lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    exponent = " kmgt".index(unit[:1] or " ")
    if unit == "i":
        raise ValueError("is not a size such as 512MiB")
    return int(Decimal(match[1]) * base**exponent)

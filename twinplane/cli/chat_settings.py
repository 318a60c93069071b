"""What `/set` changes in a chat, by the options' own names."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from twinplane.bounds import SAMPLING_RANGES, Range
from twinplane.client.options import GenerateOptions

_RANGES: Mapping[str, Range] = {**SAMPLING_RANGES, "max_tokens": Range(1, 2**32 - 1)}
NUMBERS = tuple(_RANGES)
"""Options that are one number."""


def with_option(options: GenerateOptions, name: str, text: str) -> GenerateOptions:
    """The options with another value of `name`; without it for an empty text.

    Raises ValueError, whose message is for people, for a value that the server would refuse.
    """
    changed: dict[str, Any] = {key: value for key, value in options.items() if key != name}
    if text:
        changed[name] = _number(name, text)
    return cast(GenerateOptions, changed)


def _number(name: str, text: str) -> int | float:
    kind = float if _is_float(name) else int
    try:
        value = kind(text)
    except ValueError as error:
        wanted = "a number" if kind is float else "a whole number"
        raise ValueError(f"{name}: {text} is not {wanted}") from error
    if value not in _RANGES[name]:
        raise ValueError(f"{name}: {text} is not in {_RANGES[name]}")
    return value


def _is_float(name: str) -> bool:
    hint = get_type_hints(GenerateOptions)[name]
    assert get_origin(hint) in (Union, types.UnionType)
    return float in get_args(hint)

"""Typed access to a config.json, checked as it is read. Errors name the key.

Whatever would change the model's output and is not understood is refused, never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from worker_service.domain.capability import DataType
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported

_LARGEST = 2**31 - 1
_SHOWN_LENGTH = 80
# torch's other names, and float64, which is computed in the widest format there is.
_DATA_TYPES = MappingProxyType(
    {
        **{known.value: known for known in DataType},
        "float": DataType.FLOAT32,
        "double": DataType.FLOAT32,
        "float64": DataType.FLOAT32,
        "half": DataType.FLOAT16,
    }
)


class ConfigReader:
    """Typed access to a JSON object.

    An absent key has its default, and is refused where there is none. A null is a value like any
    other: only a method that may return None accepts it. Every method raises CheckpointInvalid for
    a value of another kind.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """`prefix` stands before a key in messages."""
        self.values = values
        self.prefix = prefix

    def integer(
        self, key: str, default: int | None = None, minimum: int = 1, maximum: int = _LARGEST
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.invalid(key, "a whole number")
        if not minimum <= value <= maximum:
            raise self.invalid(key, f"a whole number from {minimum} to {maximum}")
        return value

    def integer_or_none(self, key: str, default: int | None = None) -> int | None:
        """A whole number of at least 1, or None for null."""
        if key in self.values and self.values[key] is None:
            return None
        return default if key not in self.values else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or number <= 0:
            raise self.invalid(key, "a finite number above 0")
        return number

    def number_or_none(self, key: str) -> float | None:
        """A finite number above 0, or None where it is absent or null."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.invalid(key, "true or false")
        return value

    def words(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.invalid(key, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str, vocabulary_size: int) -> tuple[int, ...]:
        """One token id or a list of them, each within the vocabulary; none where it is null."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise self.invalid(key, "a token id or a list of token ids")
            if not 0 <= token < vocabulary_size:
                raise self.invalid(key, f"within the vocabulary, 0 to {vocabulary_size - 1}")
        return tuple(ids)

    def data_type(self) -> DataType | None:
        """The format to compute in, as the weights were published.

        Raises ModelUnsupported for a format that is not known.
        """
        found = {
            key: self.values[key]
            for key in ("dtype", "torch_dtype")
            if self.values.get(key) is not None
        }
        types = {key: self._known_data_type(key, name) for key, name in found.items()}
        if len(set(types.values())) > 1:
            raise contradiction("dtype", found["dtype"], "torch_dtype", found["torch_dtype"])
        return next(iter(types.values()), None)

    def child(self, key: str) -> ConfigReader | None:
        """The object under `key`, or None where it is absent, null or empty."""
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.invalid(key, "an object")
        return ConfigReader(value, f"{self.prefix}{key}.")

    def invalid(self, key: str, wanted: str) -> CheckpointInvalid:
        """The error that says what the key's value is and what it must be."""
        shown = _shown(self.values.get(key))
        return CheckpointInvalid(f"config.json: {self.prefix}{key} is {shown}, must be {wanted}")

    def _get(self, key: str, default: object) -> object:
        if key in self.values:
            return self.values[key]
        if default is None:
            raise CheckpointInvalid(f"config.json lacks {self.prefix}{key}")
        return default

    def _known_data_type(self, key: str, name: object) -> DataType:
        known = _DATA_TYPES.get(name) if isinstance(name, str) else None
        if known is None:
            raise ModelUnsupported(key, name, ", ".join(_DATA_TYPES))
        return known


def contradiction(first: str, value: object, second: str, other: object) -> CheckpointInvalid:
    """The error for one fact that two keys tell differently."""
    return CheckpointInvalid(
        f"config.json contradicts itself: {first} is {_shown(value)} and "
        f"{second} is {_shown(other)}; remove the wrong one"
    )


def _shown(value: object) -> str:
    """The value as a config.json holds it, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}…"

"""Typed access to a config.json, checked as it is read. Errors name the key.

Whatever would change the model's output and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from worker_service.domain.capability import DataType
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported


class ConfigReader:
    """Typed access to a JSON object. A value of null counts as absent.

    Every method raises CheckpointInvalid for a value of another kind, and for an absent one where
    there is no default.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        """`prefix` stands before a key in messages."""
        self.values = values
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Whether the key is there, be it as null."""
        return key in self.values

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._invalid(key, value, f"a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._invalid(key, value, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self._invalid(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "true or false")
        return value

    def data_type(self) -> DataType | None:
        """The format that the weights were published in. Raises ModelUnsupported for another."""
        name = self.values.get("dtype", self.values.get("torch_dtype"))
        if name is None:
            return None
        try:
            return DataType(name)
        except ValueError:
            supported = ", ".join(known.value for known in DataType)
            raise ModelUnsupported("dtype", name, supported) from None

    def child(self, key: str) -> ConfigReader | None:
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._invalid(key, value, "an object")
        return ConfigReader(value, f"{self.prefix}{key}.")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointInvalid(f"config.json lacks {self.prefix}{key}")
        return value

    def _invalid(self, key: str, value: object, wanted: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"config.json: {self.prefix}{key} is {value!r}, must be {wanted}")

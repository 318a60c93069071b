"""A GGUF file as typed metadata and tensors. Only this module imports `gguf`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinplane.extras import Extra, how_to_get
from twinplane.models.errors import ConversionUnsupported, ModelInvalid
from twinplane.models.folder import check_readable, unreadable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor


class GgufFile:
    """An open GGUF file. Tensors stay on disk (a memory map) until their rows are asked for.

    Raises ModelInvalid when the file can't be read as GGUF, ConversionUnsupported when the
    `gguf` package isn't installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ModuleNotFoundError as error:
            raise ConversionUnsupported(
                f"reading GGUF needs the module {error.name}: {how_to_get(Extra.CONTROL)}"
            ) from error
        self.path = path
        check_readable(path)
        try:
            self._reader: GGUFReader = GGUFReader(path)
        except OSError as error:
            raise ModelInvalid(unreadable(path, error)) from error
        except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
            # The kind of error depends on where the file is damaged.
            raise ModelInvalid(f"{path} is not a readable GGUF file: {error}") from error
        if self._reader.byte_order == "S":
            raise ConversionUnsupported(f"{path} has the other byte order")
        self._tensors: dict[str, ReaderTensor] = {t.name: t for t in self._reader.tensors}

    # Metadata.

    def _value(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            return None
        try:
            return field.contents()
        except UnicodeDecodeError as error:
            raise ModelInvalid(f"{self.path}: {key} is not UTF-8") from error

    def _typed(self, key: str, expected: type, value: Any) -> Any:
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            name = type(value).__name__
            raise ModelInvalid(f"{self.path}: {key} is a {name}, expected {expected.__name__}")
        return value

    def find_int(self, key: str) -> int | None:
        """An integer, or None when the key isn't there."""
        value = self._value(key)
        return None if value is None else int(self._typed(key, int, value))

    def find_size(self, key: str) -> int | None:
        """An integer of at least 1, or None when the key isn't there."""
        value = self.find_int(key)
        if value is not None and value < 1:
            raise ModelInvalid(f"{self.path}: {key} is {value}, must be at least 1")
        return value

    def need_size(self, key: str) -> int:
        """An integer of at least 1; raises ModelInvalid when the key isn't there."""
        value = self.find_size(key)
        if value is None:
            raise ModelInvalid(f"{self.path}: {key} is missing")
        return value

    def find_float(self, key: str) -> float | None:
        """A finite number, or None. A float32 becomes the shortest decimal that rounds to it."""
        import numpy as np

        value = self._value(key)
        if value is None:
            return None
        number = float(str(np.float32(self._typed(key, float, value))))
        if not math.isfinite(number):
            raise ModelInvalid(f"{self.path}: {key} is {number}, must be finite")
        return number

    def metadata_keys(self) -> list[str]:
        """The metadata's keys in the file's order."""
        return list(self._reader.fields)

    def value(self, key: str) -> Any:
        """The value of any type, or None when the key isn't there."""
        return self._value(key)

    def find_bool(self, key: str) -> bool | None:
        """A flag, or None."""
        value = self._value(key)
        return None if value is None else bool(self._typed(key, bool, value))

    def find_text(self, key: str) -> str | None:
        """A string, or None."""
        value = self._value(key)
        return None if value is None else str(self._typed(key, str, value))

    def find_list(self, key: str, item: type) -> list[Any] | None:
        """A list of `item`, or None."""
        value = self._value(key)
        if value is None:
            return None
        items: list[Any] = self._typed(key, list, value)
        if not all(type(entry) is item for entry in items):
            raise ModelInvalid(f"{self.path}: {key} is not a list of {item.__name__}")
        return items

    # Tensors.

    def tensor_names(self) -> list[str]:
        """Names in the file's order."""
        return list(self._tensors)

    def has_tensor(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape, outermost dimension first."""
        if name not in self._tensors:
            raise ModelInvalid(f"{self.path}: tensor {name} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape.tolist()))

    def rows(
        self, name: str, order: npt.NDArray[np.int64] | None = None, chunk_bytes: int = 1 << 24
    ) -> Iterator[npt.NDArray[np.float32]]:
        """The tensor as float32, in pieces of whole rows of at most `chunk_bytes`, at least a row.

        `order` int64 [rows] gives the source row of each output row. Rows are reordered before they
        are expanded, since each is quantised by itself.
        """
        import numpy as np
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        data = np.asarray(tensor.data)
        row_bytes = 4 * int(np.prod(self.shape(name)[1:], dtype=np.int64))
        step = max(1, chunk_bytes // max(1, row_bytes))
        for start in range(0, len(data), step):
            part = (
                data[start : start + step] if order is None else data[order[start : start + step]]
            )
            try:
                values = dequantize(part, tensor.tensor_type)
            except NotImplementedError as error:
                raise ConversionUnsupported(
                    f"{self.path}: tensor {name} is {tensor.tensor_type.name}, which can't be read"
                ) from error
            yield np.ascontiguousarray(values, dtype="<f4")

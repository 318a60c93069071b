"""What can go wrong between a model's name and a folder that a worker can load.

    ModelError
    ├── ModelNotFound         the model is not here; the message says how to get it
    ├── NotConverted          a sound GGUF file that was not converted yet, by a caller's wish
    ├── ModelInvalid          the model is here but unusable; the message names the file or the key
    ├── ConversionUnsupported a GGUF feature has no exact equivalent; the message names it
    ├── ModelRefused          no worker here can run it; the message says what its config asks for
    ├── PullFailed            a download failed; the message says what to try
    ├── CacheUnusable         the model cache can't be written; the message names the file
    └── HashMismatch          downloaded bytes have another digest; nothing was kept

Every message is one line for people.
"""

from __future__ import annotations

from collections.abc import Mapping


class ModelError(Exception):
    """A model can't be found, fetched, read or converted."""


class ModelNotFound(ModelError):
    """The model is not on this machine."""


class NotConverted(ModelError):
    """A GGUF file that can be converted, and was not. `config` is what its config.json will be."""

    def __init__(self, file: str, config: Mapping[str, object]) -> None:
        super().__init__(f"{file} is a GGUF file that is converted on first use")
        self.config = config


class ModelRefused(ModelError):
    """The model is sound, but asks for something that no worker here can do."""


class ModelInvalid(ModelError):
    """The files are there, but can't be used."""


class ConversionUnsupported(ModelError):
    """A conversion is refused because it would change what the model computes."""


class PullFailed(ModelError):
    """A download failed."""


class CacheUnusable(ModelError):
    """The model cache can't be written, for lack of room or permission."""


class HashMismatch(ModelError):
    """Downloaded bytes differ from the pinned digest."""

    def __init__(self, what: str, expected: str, actual: str) -> None:
        super().__init__(f"{what}: SHA-256 is {actual}, expected {expected}; nothing was kept")
        self.expected = expected
        self.actual = actual

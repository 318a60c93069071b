"""What can go wrong between a model's name and a folder a worker can load.

    ModelError
    ├── ModelNotFound         no such model here: the message says how to get it
    ├── ModelInvalid          it is here, and no plane can use it: names the file or the key
    ├── ConversionUnsupported a GGUF feature without an exact equivalent: names it
    ├── PullFailed            a download didn't work: says what to try
    ├── CacheUnusable         the model cache can't be written: names the file
    └── HashMismatch          what was downloaded is not what was meant; nothing was kept

Every message is one line for people.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be found, fetched, read or converted."""


class ModelNotFound(ModelError):
    """No such model on this machine."""


class ModelInvalid(ModelError):
    """The files are there and can't be used."""


class ConversionUnsupported(ModelError):
    """Converting would silently change what the model computes, so it is refused."""


class PullFailed(ModelError):
    """A download failed."""


class CacheUnusable(ModelError):
    """The model cache can't be written: no room, or no permission."""


class HashMismatch(ModelError):
    """Downloaded bytes differ from the pinned digest."""

    def __init__(self, what: str, expected: str, actual: str) -> None:
        super().__init__(f"{what}: SHA-256 is {actual}, expected {expected}; nothing was kept")
        self.expected = expected
        self.actual = actual

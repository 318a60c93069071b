"""Which errors say that memory has run out, or that a device is gone. Each library says it in its
own way."""

from __future__ import annotations

import errno

# torch raises a plain RuntimeError where a CPU's memory is not given.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "error: out of memory",
)
_LOST_WORDS = ("cuda error:", "hip error:", "cublas_status_", "cudnn_status_")
_SHOWN_LENGTH = 200


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy, torch, a GPU, the kernels or the system had no memory to give."""
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            if _is_a(error, "OutOfMemoryError"):  # torch's, for devices with memory of their own
                return True
            return any(words in str(error).lower() for words in _WORDS)
        case _:
            return False


def is_device_lost(error: BaseException) -> bool:
    """Whether a GPU has failed so that this process can't use it again: every later call to it
    fails as well."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return _is_a(error, "AcceleratorError") or any(
        words in str(error).lower() for words in _LOST_WORDS
    )


def _is_a(error: BaseException, name: str) -> bool:
    """Whether the error is of torch's class of that name, without importing torch."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def one_line(error: BaseException) -> str:
    """The first sentence of what the error says, else its kind: torch's goes on for paragraphs."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0][:_SHOWN_LENGTH] or type(error).__name__

"""Which errors say that memory has run out. Each library says it in its own way."""

from __future__ import annotations

import errno

# torch raises a plain RuntimeError where a CPU's memory is not given.
_WORDS = ("can't allocate memory", "not enough memory", "cannot allocate memory")
_SHOWN_LENGTH = 200


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy, torch, a GPU, the kernels or the system had no memory to give."""
    match error:
        case MemoryError():
            return True
        case OSError():
            return error.errno == errno.ENOMEM
        case RuntimeError():
            if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
                return True  # torch's, for devices with memory of their own
            return any(words in str(error).lower() for words in _WORDS)
        case _:
            return False


def one_line(error: BaseException) -> str:
    """The first sentence of what the error says, else its kind: torch's goes on for paragraphs."""
    text = " ".join(str(error).split())
    return text.partition(". ")[0][:_SHOWN_LENGTH] or type(error).__name__

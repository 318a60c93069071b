"""What nobody caught, and what libraries warn of, as log lines instead of bare text among them."""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)


def log_what_nobody_caught() -> None:
    """Sends uncaught exceptions of every thread, ignored ones and warnings to the log."""
    sys.excepthook = _failed
    threading.excepthook = _thread_failed
    sys.unraisablehook = _ignored
    logging.captureWarnings(True)


def _failed(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    reason = f"failed: {kind.__name__}: {error}".rstrip(": ")
    _logger.critical("failed", exc_info=(kind, error, traceback))
    _logger.error("stopped", extra=fields(reason=reason))


def _thread_failed(what: threading.ExceptHookArgs) -> None:
    if what.exc_value is not None:
        _logger.error(
            "a thread failed", exc_info=(what.exc_type, what.exc_value, what.exc_traceback)
        )


def _ignored(what: sys.UnraisableHookArgs) -> None:
    if what.exc_value is not None:
        _logger.error(
            "an exception was ignored",
            exc_info=(what.exc_type, what.exc_value, what.exc_traceback),
            extra=fields(where=repr(what.object)),
        )

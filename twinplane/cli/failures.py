"""Turns an error into one line for people: what happened, and what to do next."""

from __future__ import annotations

from twinplane.errors import InvalidRequest, ModelNotFound, Overloaded, TwinplaneError, Unavailable


def one_line(error: Exception) -> str:
    """The line for an error. Only errors of the client get advice here; others bring their own."""
    match error:
        case InvalidRequest() if error.violations:
            return "; ".join(f"{v.field}: {v.description}" for v in error.violations)
        case Unavailable(reason=""):  # no server answered
            return "no server answers: is `twinplane up` running? (--address names another)"
        case Overloaded(retry_after=float(seconds)):
            return f"{_first_line(error)} (try again in {seconds:g} s)"
        case ModelNotFound():
            return f"{_first_line(error)} (without --model the served one is used)"
        case TwinplaneError():
            return _first_line(error) or type(error).__name__
        case _:
            return _first_line(error)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())

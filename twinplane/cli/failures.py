"""Turns an error into one line for people: what happened, and what to do next."""

from __future__ import annotations

import re

from twinplane.cli.connection import ADDRESS_VARIABLE
from twinplane.errors import (
    DeadlineExceeded,
    InvalidAddress,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinplaneError,
    Unavailable,
    WrongServer,
)

_FLAGS = {
    "adapter": "--adapter",
    "model": "--model",
    "stop.max_tokens": "--max-tokens",
    "stop.strings": "--stop",
    "stop.ignore_end_of_sequence": "--ignore-eos",
    "rollout.name": "--name",
    "rollout.disk.path": "PATH",
    "rollout.expected_digest": "--digest",
    "rollout.canary": "--canary",
    "rollout.canary.percent": "--canary",
    "rollout.canary.observation": "--observe",
}
_SAMPLING = "sampling."
_ANOTHER = f"--address or {ADDRESS_VARIABLE} names another"
_NOBODY = f"is `twinplane up` running? {_ANOTHER}"
_ADVICE = (
    ("does it want TLS?", f"--tls encrypts; {_ANOTHER}"),
    ("does it want a TLS certificate", "--tls-cert and --tls-key show it one"),
    ("certificate is not trusted", "--tls-ca names the certificates to trust"),
    ("certificate is for another host", "its certificate has to name the host of --address"),
    ("does not speak TLS", f"without --tls it is not encrypted; {_ANOTHER}"),
    ("what listens there", _ANOTHER),
)
"""What to do about a cause of twinplane.client.endpoint; the first whose words are in the line."""


def one_line(error: Exception) -> str:
    """The line for an error. Only errors of the client get advice here; others bring their own."""
    match error:
        case InvalidRequest() if error.violations:
            return "; ".join(f"{_named(v.field)}: {v.description}" for v in error.violations)
        case Unavailable(reason="", partial=None):  # no server answered
            line = _first_line(error)
            hint = next((advice for words, advice in _ADVICE if words in line), _NOBODY)
            return f"{line} ({hint})"
        case DeadlineExceeded(reason="", partial=None):
            return f"{_first_line(error)} (it is no Twinplane, or it hangs: {_ANOTHER})"
        case InvalidAddress() | WrongServer():
            return f"{_first_line(error)} (--address or {ADDRESS_VARIABLE})"
        case Overloaded(retry_after=float(seconds)):
            return f"{_first_line(error)} (try again in {seconds:g} s)"
        case ModelNotFound():
            return f"{_first_line(error)} (without --model the served one is used)"
        case TwinplaneError():
            return _first_line(error) or type(error).__name__
        case _:
            return _first_line(error)


def _named(field: str) -> str:
    """A field of a request, with the flag that sets it, if one does."""
    plain = re.sub(r"\[\d+\]", "", field)
    flag = _FLAGS.get(plain)
    if plain.startswith(_SAMPLING):
        flag = "--" + plain.removeprefix(_SAMPLING).replace("_", "-")
    return field if flag is None else f"{field} ({flag})"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())

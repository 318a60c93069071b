"""The flags of commands that talk to a control plane."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from typing import cast

from twinplane.cli.connection import Connection, add_connection_flags, connection
from twinplane.client.options import GenerateOptions

_WAIT = 10.0
CONVERSATION_WAIT = 60.0
"""Seconds; somebody sits there, sees what is waited for, and can leave."""


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Where to send a request, and the options that were given for it.

    `default_max_tokens` is how long an answer may be where the options don't say. A server that is
    starting is waited for `wait_seconds`.
    """

    connection: Connection
    options: GenerateOptions
    default_max_tokens: int
    wait_seconds: float

    @property
    def options_with_max_tokens(self) -> GenerateOptions:
        """The options; `max_tokens` among them."""
        return {"max_tokens": self.default_max_tokens, **self.options}


def add_request_flags(
    parser: argparse.ArgumentParser, *, max_tokens: int, conversation: bool = False
) -> None:
    """Adds the flags to `parser`, in two groups. `max_tokens` is the default, as far as it fits.

    A command that may be a `conversation` waits longer in one.
    """
    parser.set_defaults(default_max_tokens=max_tokens)
    server = add_connection_flags(parser)
    server.add_argument(
        "--model", default="", metavar="NAME", help="ask this model (default: the one served)"
    )
    server.add_argument(
        "--adapter", metavar="NAME", help="answer with this LoRA adapter of the model"
    )
    server.add_argument(
        "--wait",
        type=_seconds,
        metavar="S",
        help=f"wait up to S seconds for a server that starts (default: {_WAIT:g}"
        + (f", in a conversation {CONVERSATION_WAIT:g})" if conversation else ")"),
    )
    sampling = parser.add_argument_group("sampling (default: the model's own)")
    sampling.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"stop after N tokens (default: {max_tokens}, or as many as fit)",
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        metavar="X",
        help="draw more freely the larger X is; 0: always the likeliest token",
    )
    sampling.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens")
    sampling.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="draw from the likeliest tokens that reach this probability",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        metavar="X",
        help="drop tokens less likely than X times the likeliest",
    )
    sampling.add_argument("--seed", type=int, metavar="N", help="draw the same tokens again")
    sampling.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text (repeatable)",
    )
    sampling.add_argument(
        "--ignore-eos",
        action="store_const",
        const=True,
        help="go on past the model's own end of an answer, up to the most tokens",
    )


def request_flags(namespace: argparse.Namespace, *, wait: float = _WAIT) -> RequestFlags:
    """The flags that have a value. Each of them is the option of the same name.

    `wait` holds where its flag isn't given.
    """
    given = {
        name: value
        for name, value in vars(namespace).items()
        if name in GenerateOptions.__optional_keys__ and value is not None
    }
    options = cast(GenerateOptions, given)
    given_wait: float | None = namespace.wait
    return RequestFlags(
        connection(namespace),
        options,
        namespace.default_max_tokens,
        wait if given_wait is None else given_wait,
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def quiet_grpc() -> None:
    """Keeps gRPC's own log lines out of a command's output. Call it before gRPC is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

"""The flags of commands that talk to a control plane."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import cast

from twinplane.cli.connection import Connection, add_connection_flags, connection
from twinplane.client.options import GenerateOptions


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Where to send a request, and the options that were given for it."""

    connection: Connection
    options: GenerateOptions


def add_request_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the flags to `parser`, in two groups."""
    server = add_connection_flags(parser)
    server.add_argument("--model", default="", metavar="NAME", help="default: the one served")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help="default: %(default)s"
    )
    sampling.add_argument("--temperature", type=float, metavar="X", help="0: greedy")
    sampling.add_argument("--top-k", type=int, metavar="N", help="only the N likeliest tokens")
    sampling.add_argument("--top-p", type=float, metavar="X", help="only this much probability")
    sampling.add_argument("--min-p", type=float, metavar="X", help="only X times the likeliest")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same tokens")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the output (repeatable)"
    )


def request_flags(namespace: argparse.Namespace) -> RequestFlags:
    """The flags that have a value. Each of them is the option of the same name."""
    given = {
        name: value
        for name, value in vars(namespace).items()
        if name in GenerateOptions.__optional_keys__ and value is not None
    }
    return RequestFlags(connection(namespace), cast(GenerateOptions, given))


def quiet_grpc() -> None:
    """Keeps gRPC's own log lines out of a command's output. Call it before gRPC is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

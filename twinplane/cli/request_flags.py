"""The flags of commands that talk to a control plane."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Where to send a request and how its tokens are chosen. None is left to the server."""

    address: str
    model: str
    max_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    stop: tuple[str, ...]


def add_request_flags(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds them in two groups."""
    server = parser.add_argument_group("server")
    server.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        help="host:port or unix:PATH of the control plane (default: %(default)s)",
    )
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
    """What was given."""
    return RequestFlags(
        address=namespace.address,
        model=namespace.model,
        max_tokens=namespace.max_tokens,
        temperature=namespace.temperature,
        top_k=namespace.top_k,
        top_p=namespace.top_p,
        min_p=namespace.min_p,
        seed=namespace.seed,
        stop=tuple(namespace.stop),
    )


def quiet_grpc() -> None:
    """Keeps gRPC's own log lines out of a command's output; before gRPC is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

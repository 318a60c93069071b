"""`twinplane status` says what a running server is, whether it is ready, and what it serves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinplane.cli.connection import add_connection_flags, connection
from twinplane.cli.request_flags import quiet_grpc
from twinplane.settings.hints import parse

if TYPE_CHECKING:
    from twinplane.cli.server_report import Report

_TIMEOUT_SECONDS = 5.0


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = argparse.ArgumentParser(
        prog="twinplane status",
        usage="%(prog)s [options]",
        description="Say whether a server is ready and what it serves; a worker's address will do.",
        allow_abbrev=False,
    )
    add_connection_flags(parser)
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT_SECONDS, metavar="X",
        help="seconds to wait for an answer (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 when the server takes requests, else 1. Raises TwinplaneError: no server answers.

    Exits with 2 for wrong usage.
    """
    parser = command_line()
    namespace = parse(parser, argv)
    if not 0 < namespace.timeout <= 3600:
        parser.error("--timeout must be above 0 and at most 3600 seconds")
    quiet_grpc()
    from twinplane.cli.server_report import fetch

    report = fetch(connection(namespace), namespace.timeout)
    print(json.dumps(report.as_json(), indent=2) if namespace.json else _for_people(report))
    return 0 if report.ready else 1


def _for_people(report: Report) -> str:
    state = "ready" if report.ready else "not ready"
    lines = [("address", report.address), (report.plane, state)]
    if report.reason:
        lines.append(("reason", report.reason))
    lines += report.facts
    for model in report.models:
        weights = f"{model.weight_digest[:12]} (generation {model.weight_generation})"
        lines += [
            ("model", model.name),
            ("length", f"{model.max_sequence_token_count} tokens of a prompt and its answer"),
            ("vocabulary", f"{model.vocabulary_size} tokens"),
            ("weights", weights),
        ]
        if model.supports_chat is not None:
            lines.append(("chat", "yes" if model.supports_chat else "no: it has no template"))
    width = max(len(subject) for subject, _ in lines)
    return "\n".join(f"{subject:{width}}  {text}" for subject, text in lines)

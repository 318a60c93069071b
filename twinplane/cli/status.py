"""`twinplane status` says what a running server is, whether it is ready, and what it serves."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from twinplane.cli.connection import add_connection_flags, connection
from twinplane.cli.request_flags import quiet_grpc
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import parse

if TYPE_CHECKING:
    from twinplane.cli.server_report import Report
    from twinplane.client.values import SamplingDefaults, ServingWorker

_TIMEOUT_SECONDS = 5.0


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane status",
        "Say whether a server is ready, what it serves and how much room it has.\n"
        "The server is a control plane, or a worker by its own address.",
        notes=("exit codes: 0 ready, 1 not ready or no answer, 2 wrong usage", ""),
        examples=("twinplane status", "twinplane status --address 127.0.0.1:50052 --json"),
    )
    add_connection_flags(parser)
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT_SECONDS, metavar="X",
        help="wait X seconds for an answer (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
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
    lines += [(subject, _text(value)) for subject, value in report.facts]
    for worker in report.workers:
        lines += _worker_lines(worker)
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
        if (sampling := model.default_sampling) is not None:
            lines.append(("sampling", _sampling(sampling)))
    width = max(len(subject) for subject, _ in lines)
    return "\n".join(f"{subject:{width}}  {text}" for subject, text in lines)


def _worker_lines(worker: ServingWorker) -> list[tuple[str, str]]:
    lines = [("worker", _state(worker))]
    if worker.address:
        lines.append(("replica", f"{worker.replica}, at {worker.address}"))
    if worker.reason and worker.replica_state.value != "attached":
        lines.append(("because", worker.reason))
    if worker.worker_id:
        lines += [("worker id", worker.worker_id), ("device", worker.device)]
    if worker.kv_token_count:
        free, every = worker.free_kv_token_count, worker.kv_token_count
        lines.append(("room", f"{free:,} of {every:,} KV tokens are free"))
    if worker.max_sequence_count:
        running, waiting = worker.running_sequence_count, worker.waiting_sequence_count
        most = f"at most {worker.max_sequence_count:,} run at once"
        lines.append(("sequences", f"{running:,} run, {waiting:,} wait; {most}"))
    return lines


def _state(worker: ServingWorker) -> str:
    life = worker.replica_state.value
    if life in ("suspect", "draining"):
        return life
    if life == "gone" and worker.away_seconds is not None:
        return f"gone for {max(1, round(worker.away_seconds))} s"
    if worker.away_seconds is not None:
        return f"away for {max(1, round(worker.away_seconds))} s"
    if worker.state.value == "awaited":
        return "none has come yet"
    return worker.state.value


def _sampling(sampling: SamplingDefaults) -> str:
    """What holds where a request does not say, by the names of the flags."""
    values = [f"{name.replace('_', '-')} {value:g}" for name, value in asdict(sampling).items()]
    return f"{', '.join(values)} by default"


def _text(value: str | int) -> str:
    return f"{value:,}" if isinstance(value, int) else value

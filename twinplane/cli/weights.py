"""`twinplane weights` gives the workers of a running server other weights, or takes them back."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from twinplane.cli.operating import add_admin_flag, operating
from twinplane.cli.request_flags import quiet_grpc
from twinplane.cli.rollout_progress import is_done, state_word, watch, words_of
from twinplane.settings.command_parser import CommandParser, complete_as_path
from twinplane.settings.hints import parse

STRATEGIES = ("rolling", "all-at-once")
POLICIES = ("finish-on-old", "continue-on-new", "keep-kv", "abort")
PLACEMENTS = ("auto", "beside", "in-place")
_DIGITS = 12


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane weights",
        "Give the workers of a running server other weights while it serves.\n"
        "The control plane needs --admin-port, and each worker --weights-root.",
        usage="%(prog)s {update,status,rollback,abort} [options]",
        notes=("exit codes: 0 all have them, 1 it failed or was turned back, 2 wrong usage", ""),
        examples=(
            "twinplane weights update ~/models/step-200 --name step-200",
            "twinplane weights status",
            "twinplane weights rollback",
        ),
    )
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        title="commands",
        parser_class=argparse.ArgumentParser,
        prog="twinplane weights",
    )
    update = commands.add_parser("update", help="PATH --name NAME: roll other weights out")
    _add_update_flags(update)
    status = commands.add_parser("status", help="say what is wanted, and what each replica has")
    status.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    back = commands.add_parser("rollback", help="go back to the weights before the last rollout")
    abort = commands.add_parser("abort", help="turn the rollout that runs back")
    for each in (update, back, abort):
        each.add_argument("--no-wait", action="store_true", help="return once it is written down")
    for each in (update, status, back, abort):
        add_admin_flag(each)
    return parser


def _add_update_flags(parser: argparse.ArgumentParser) -> None:
    path = parser.add_argument(
        "path",
        metavar="PATH",
        help="model folder or .gguf file that every worker can read: one that is on this machine, "
        "or else one below the workers' --weights-root",
    )
    complete_as_path(path)
    parser.add_argument("--name", required=True, help="what to call them, in metrics and answers")
    parser.add_argument(
        "--strategy", choices=STRATEGIES, default=STRATEGIES[0],
        help="one replica at a time, or all at once (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--in-flight", choices=POLICIES, default=POLICIES[0],
        help="what becomes of answers that have begun (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default=PLACEMENTS[0],
        help="where workers prepare them; in-place needs no second copy, and makes steps wait "
        "while they load (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--partial", action="store_true", help="they are some tensors; the others stay"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="send the safetensors files at PATH of this machine through the control plane",
    )
    parser.add_argument(
        "--digest", default="", metavar="HEX", help="refuse weights that have another digest"
    )
    parser.add_argument(
        "--canary", type=int, metavar="PERCENT", help="give them to so many replicas first"
    )
    parser.add_argument(
        "--observe", type=float, metavar="SECONDS",
        help="for so long, before the others follow (default: 60)",
    )  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Returns 0 when all is as asked, else 1. Raises TwinplaneError. Exits with 2 for wrong
    usage."""
    parser = command_line()
    namespace = parse(parser, argv)
    if namespace.command == "update" and namespace.observe is not None and not namespace.canary:
        parser.error("--observe goes with --canary")
    quiet_grpc()
    from twinplane.control.v1 import control_pb2 as pb

    with operating(namespace.admin) as stub:
        match namespace.command:
            case "update":
                answer = stub.UpdateWeights(_requests(pb, namespace))
            case "rollback":
                answer = stub.RollbackWeights(pb.RollbackWeightsRequest())
            case "abort":
                answer = stub.AbortRollout(pb.AbortRolloutRequest())
            case _:
                state = stub.GetWeights(pb.GetWeightsRequest()).state
                print(_as_json(state) if namespace.json else for_people(state))
                return 0
        rollout_id = answer.rollout.rollout_id
        if namespace.no_wait:
            print(f"{rollout_id}: see twinplane weights status")
            return 0
        last = watch(stub, rollout_id)
    print(words_of(last), file=sys.stderr)
    wanted = pb.ROLLOUT_STATE_ROLLED_BACK if namespace.command == "abort" else None
    return 0 if is_done(last, wanted) else 1


def _requests(pb: Any, namespace: argparse.Namespace) -> Iterator[Any]:
    path = Path(namespace.path).expanduser()
    rollout = pb.WeightsRollout(
        name=namespace.name,
        is_partial=namespace.partial,
        strategy=f"ROLLOUT_STRATEGY_{_constant(namespace.strategy)}",
        in_flight=f"IN_FLIGHT_POLICY_{_constant(namespace.in_flight)}",
        placement=None
        if namespace.placement == PLACEMENTS[0]
        else f"WEIGHTS_PLACEMENT_{_constant(namespace.placement)}",
        expected_digest=namespace.digest,
    )
    if namespace.canary is not None:
        rollout.canary.percent = max(0, namespace.canary)
        if namespace.observe is not None:
            rollout.canary.observation.FromNanoseconds(round(namespace.observe * 1e9))
    if namespace.stream:
        from twinplane.cli.weights_stream import messages, tensors_at

        return messages(pb, rollout, tensors_at(path))
    rollout.disk.path = str(path.absolute()) if path.exists() else namespace.path
    return iter([pb.UpdateWeightsRequest(rollout=rollout)])


def _constant(word: str) -> str:
    return word.upper().replace("-", "_")


def for_people(state: Any) -> str:
    """A state as lines of a subject and what is said of it."""
    lines: list[tuple[str, str]] = []
    if state.HasField("rollout"):
        rollout = state.rollout
        lines += [
            ("rollout", f"{rollout.rollout_id}, {state_word(rollout.state)}"),
            ("to", _named(rollout.target)),
            ("from", _named(rollout.before)),
        ]
        if rollout.reason:
            lines.append(("because", rollout.reason))
    else:
        lines.append(("rollout", "none yet: workers have the weights that they started with"))
    if state.is_paused:
        lines.append(("paused", "yes; twinplane resume goes on"))
    for replica in state.replicas:
        has = replica.name or replica.digest[:_DIGITS] or "nothing that is known"
        at = f" at {replica.address}" if replica.address else ""
        lines.append((f"replica {replica.replica}", f"{phase_word(replica)}, has {has}{at}"))
        if replica.trouble:
            lines.append(("trouble", replica.trouble))
    width = max(len(subject) for subject, _ in lines)
    return "\n".join(f"{subject:{width}}  {text}" for subject, text in lines)


def phase_word(replica: Any) -> str:
    """What a replica does, in a word."""
    from twinplane.control.v1 import control_pb2 as pb

    name: str = pb.ReplicaPhase.Name(replica.phase)
    return name.removeprefix("REPLICA_PHASE_").lower()


def _named(weights: Any) -> str:
    parts = [weights.name or "the weights of the start"]
    if weights.digest:
        parts.append(weights.digest[:_DIGITS])
    if weights.path:
        parts.append(weights.path)
    return ", ".join(parts)


def _as_json(state: Any) -> str:
    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(
        state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return json.dumps(fields, indent=2)

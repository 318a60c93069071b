"""`twinplane pause` has a running server compute nothing until `twinplane resume`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from twinplane.cli.operating import add_admin_flag, operating
from twinplane.cli.request_flags import quiet_grpc
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import parse

POLICIES = ("keep-kv", "continue-on-new", "finish-on-old", "abort")


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane pause",
        "Have a running server compute nothing until twinplane resume.\nRequests that come wait.",
        notes=("exit codes: 0 paused, 1 not, 2 wrong usage", ""),
        examples=("twinplane pause", "twinplane pause --in-flight finish-on-old --refuse-new"),
    )
    parser.add_argument(
        "--in-flight", choices=POLICIES, default=POLICIES[0],
        help="what becomes of answers that have begun: keep-kv leaves them as they are "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--refuse-new", action="store_true", help="refuse requests that come, instead of queuing"
    )
    add_admin_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0. Raises TwinplaneError. Exits with 2 for wrong usage."""
    namespace = parse(command_line(), argv)
    quiet_grpc()
    from twinplane.control.v1 import control_pb2 as pb

    policy = f"IN_FLIGHT_POLICY_{namespace.in_flight.upper().replace('-', '_')}"
    request = pb.PauseRequest(in_flight=policy, refuse_new=namespace.refuse_new)
    with operating(namespace.admin) as stub:
        stub.Pause(request)
    print("paused; twinplane resume goes on")
    return 0

"""`twinplane resume` ends a pause."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from twinplane.cli.operating import add_admin_flag, operating
from twinplane.cli.request_flags import quiet_grpc
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.hints import parse


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane resume",
        "Have a paused server go on.",
        notes=("exit codes: 0 it goes on, 1 not, 2 wrong usage", ""),
        examples=("twinplane resume",),
    )
    add_admin_flag(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0. Raises TwinplaneError. Exits with 2 for wrong usage."""
    namespace = parse(command_line(), argv)
    quiet_grpc()
    from twinplane.control.v1 import control_pb2 as pb

    with operating(namespace.admin) as stub:
        stub.Resume(pb.ResumeRequest())
    print("it goes on")
    return 0

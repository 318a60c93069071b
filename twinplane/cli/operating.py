"""How commands reach the operators' port of a control plane, and what its errors mean to people."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from twinplane.client.channel import OPTIONS
from twinplane.client.endpoint import Endpoint, checked_address
from twinplane.common.v1.errors_pb2 import ERROR_REASON_METHOD_NOT_FOUND
from twinplane.control.v1 import control_pb2_grpc
from twinplane.errors import InvalidRequest, TwinplaneError
from twinplane.grpc.status import read, reason_name
from twinplane.settings.control import DEFAULT_ADMIN_ADDRESS

ADMIN_VARIABLE = "TWINPLANE_ADMIN_ADDRESS"
_ANOTHER = f"--admin or {ADMIN_VARIABLE} names another"
_NO_METHOD = reason_name(ERROR_REASON_METHOD_NOT_FOUND)


class OperatorError(TwinplaneError):
    """The operators' port can't be reached, or refuses."""


def add_admin_flag(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that says where the port is."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--admin",
        default=os.environ.get(ADMIN_VARIABLE) or DEFAULT_ADMIN_ADDRESS,
        metavar="ADDRESS",
        help=f"reach the control plane's --admin-port at host:port ({ADMIN_VARIABLE}; default: "
        f"{DEFAULT_ADMIN_ADDRESS})",
    )


@contextmanager
def operating(address: str) -> Iterator[Any]:
    """A stub of ControlService. Raises InvalidRequest or OperatorError, for a call that fails in
    the `with` block."""
    address = checked_address(address)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        try:
            yield control_pb2_grpc.ControlServiceStub(channel)
        except grpc.RpcError as error:
            if violations := read(error).violations:
                raise InvalidRequest(read(error).message, violations=violations) from error
            raise OperatorError(_words(address, error)) from error


def _words(address: str, error: grpc.RpcError) -> str:
    status = read(error)
    if status.reason == _NO_METHOD:
        return f"{address} is not the --admin-port of a control plane; {_ANOTHER}"
    if status.reason:
        return status.message
    if status.code is grpc.StatusCode.UNAVAILABLE:
        line = Endpoint(address, is_secure=False).unavailable(status.message)
        return f"{line} (was the control plane started with --admin-port? {_ANOTHER})"
    return status.message

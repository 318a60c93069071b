"""Turns a call's status into the error that callers see, or into another attempt."""

from __future__ import annotations

import grpc

from twinplane.client.endpoint import Endpoint, has_broken
from twinplane.client.retry import Attempts
from twinplane.common.v1.errors_pb2 import ERROR_REASON_METHOD_NOT_FOUND
from twinplane.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinplaneError,
    Unavailable,
    WeightsChanged,
    WrongServer,
)
from twinplane.grpc.status import Status, read, reason_name
from twinplane.inference.v1 import inference_pb2

# A code that is not here is InternalError: the server has no reason to send it.
_ERRORS: dict[grpc.StatusCode, type[TwinplaneError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.ABORTED: WeightsChanged,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNIMPLEMENTED: WrongServer,
}

SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
_WORKER_SERVICE = "twinplane.worker.v1.ModelRunnerService"
_TOO_LARGE = "message larger than max"
_NO_METHOD = reason_name(ERROR_REASON_METHOD_NOT_FOUND)


class Failures:
    """What ends the calls of one client, as errors. The client sets `client_closed` once it is."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.client_closed = False

    def error_of(
        self, failure: grpc.RpcError, timeout: float | None = None, *, cancelled: bool = False
    ) -> TwinplaneError:
        """The error for a failed call, with all that its status says.

        `timeout` is the call's, in seconds; `cancelled` says that its caller cancelled it.
        """
        status = read(failure)
        kind = InvalidRequest if _is_too_large(status) else _ERRORS.get(status.code, InternalError)
        return kind(
            self._message(status, timeout, cancelled=cancelled),
            reason=status.reason,
            metadata=status.metadata,
            retry_after=status.retry_after,
            violations=status.violations,
        )

    def wait_or_raise(
        self, attempts: Attempts, failure: grpc.RpcError, *, resumes: bool = False
    ) -> float:
        """Returns the seconds to wait before the next attempt. Raises the error when there is
        none. `resumes`: a call that broke after a server had taken it up gets the patience of one.
        """
        was_taken_up = resumes and (attempts.is_resuming or self._broke(failure))
        error = self.error_of(failure, attempts.timeout)
        wait = attempts.wait_to_resume(error) if was_taken_up else attempts.wait_after(error)
        if wait is None:
            raise error from failure
        return wait

    def _broke(self, failure: grpc.RpcError) -> bool:
        """Whether the connection to a server broke while the call ran."""
        status = read(failure)
        is_librarys = status.code is grpc.StatusCode.UNAVAILABLE and not status.reason
        return is_librarys and has_broken(status.message)

    def not_a_control_plane(self) -> WrongServer:
        """The error for a server whose health knows no service of clients."""
        return WrongServer(f"the server at {self._endpoint.address} is no control plane")

    def _message(self, status: Status, timeout: float | None, *, cancelled: bool) -> str:
        """The server's words; plain ones instead of the library's, which bear no reason."""
        address = self._endpoint.address
        match status:
            case Status(reason=reason) if reason == _NO_METHOD:
                return self._wrong_server(status)
            case Status(reason=reason) if reason:
                return status.message
            case _ if _is_too_large(status):
                # Newer releases of gRPC put a clause around their own words.
                sizes = status.message.partition(_TOO_LARGE)[2].strip().partition(")")[0] + ")"
                if "CLIENT: Received" in status.message:
                    return f"the answer has more bytes than this client takes {sizes}: stream it"
                return f"the request has more bytes than can be sent {sizes}"
            case Status(code=grpc.StatusCode.CANCELLED) if self.client_closed:
                return "the client was closed while the call ran"
            case Status(code=grpc.StatusCode.CANCELLED) if cancelled:
                return "the call was cancelled by its client"
            case Status(code=grpc.StatusCode.UNAVAILABLE):
                return self._endpoint.unavailable(status.message)
            case Status(code=grpc.StatusCode.DEADLINE_EXCEEDED) if timeout is not None:
                return f"{address} had not answered in full after {timeout:g} s"
            case Status(code=grpc.StatusCode.UNIMPLEMENTED):
                return f"the server at {address} is no control plane: {status.message}"
            case _:
                return status.message

    def _wrong_server(self, status: Status) -> str:
        address = self._endpoint.address
        services = status.metadata.get("services", "").split(",")
        if SERVICE in services:
            return f"the control plane at {address} is older than this client: {status.message}"
        if _WORKER_SERVICE in services:
            return (
                f"a worker listens at {address}, not a control plane: connect to the control plane"
                " that uses this worker"
            )
        return f"the server at {address} is no control plane; it serves {', '.join(services)}"


def _is_too_large(status: Status) -> bool:
    """Whether the library refused a message for its size, on either side."""
    is_librarys = status.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not status.reason
    return is_librarys and _TOO_LARGE in status.message

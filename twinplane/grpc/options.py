"""Options that several servers or channels share. Options of one server stay with that server."""

from __future__ import annotations

from twinplane.bounds import WORKER_MESSAGE_BYTES

Option = tuple[str, int]

SERVER_OPTIONS: tuple[Option, ...] = (
    # Without this a second server could take the same port, and silently get some of the calls.
    ("grpc.so_reuseport", 0),
    # Peers may ping even while no call is open.
    ("grpc.keepalive_permit_without_calls", 1),
    # We notice a peer that has vanished silently, and end its calls.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

# The environment's HTTP proxy is meant for the web, not for a loopback or a cluster.
NO_PROXY: Option = ("grpc.enable_http_proxy", 0)

_WORKER_WINDOW_BYTES = 4 * 1024 * 1024
# For both ends of the worker's contract.
WORKER_CONNECTION_OPTIONS: tuple[Option, ...] = (
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
    # A fixed window that holds any usual step. Otherwise gRPC measures the right size with pings,
    # which come with nearly every message and cost processor time that the kernels need.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WORKER_WINDOW_BYTES),
)

"""Options that servers, or channels, have in common. Whatever differs stays with its server."""

from __future__ import annotations

Option = tuple[str, int]

SERVER_OPTIONS: tuple[Option, ...] = (
    # Two servers on one port would each get some of the calls, silently.
    ("grpc.so_reuseport", 0),
    # Peers may ping also while no call is open.
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that vanished without a word is noticed, and its calls ended.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)

# An HTTP proxy of the environment is meant for the web, not for a loopback or a cluster.
NO_PROXY: Option = ("grpc.enable_http_proxy", 0)

# Steps and prompts are far larger than gRPC's own limit of 4 MB allows.
WORKER_MESSAGE_BYTES = 64 * 1024 * 1024
_WORKER_WINDOW_BYTES = 4 * 1024 * 1024
# For both ends of the worker's contract.
WORKER_CONNECTION_OPTIONS: tuple[Option, ...] = (
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
    # A window that holds any usual step, in place of pings that find out how large it should be:
    # they come with nearly every message, and cost processor time that the kernels want.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", _WORKER_WINDOW_BYTES),
)

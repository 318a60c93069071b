"""Options that several servers or channels share. Options of one server stay with that server.

The library ignores an option whose name it does not know, without a word; a test holds every name
here and in both planes against those that it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.bounds import WORKER_MESSAGE_BYTES

Option = tuple[str, int]

_FOREVER_MS = 2**31 - 1  # the library's own word for it


@dataclass(frozen=True, slots=True)
class Keepalive:
    """How one end of a connection notices that the other is gone without having said so.

    After `idle_ms` milliseconds without a byte it pings, and after `answer_ms` more without an
    answer the connection is dead, with all its calls. An end that only waits, e.g. for a first
    token, answers pings all the same: the library does that beside the event loop.
    """

    idle_ms: int
    answer_ms: int

    def options(self) -> tuple[Option, ...]:
        """The options of a server or a channel."""
        return (
            ("grpc.keepalive_time_ms", self.idle_ms),
            ("grpc.keepalive_timeout_ms", self.answer_ms),
            # Without this one, a ping may stay unanswered for a minute, whatever the one above
            # says: that is for what was written and not acknowledged by the other machine.
            ("grpc.http2.ping_timeout_ms", self.answer_ms),
        )


@dataclass(frozen=True, slots=True)
class Connections:
    """How a server treats its connections.

    A peer may ping every `peer_ping_ms` milliseconds, with or without open calls, while nothing is
    sent to it; one that pings more often is cut off as abusive. A connection of `age_ms` takes no
    more calls, and its client opens another one, so that clients spread over servers that come and
    go. Its open calls go on for as long as they take. None: connections do not age.
    """

    keepalive: Keepalive
    peer_ping_ms: int
    age_ms: int | None = None

    def options(self) -> tuple[Option, ...]:
        """The options of a server."""
        age: tuple[Option, ...] = ()
        if self.age_ms is not None:
            age = (
                ("grpc.max_connection_age_ms", self.age_ms),
                ("grpc.max_connection_age_grace_ms", _FOREVER_MS),
            )
        return (
            *self.keepalive.options(),
            ("grpc.keepalive_permit_without_calls", 1),
            # Half of what is allowed, because a network delays some pings and not others.
            ("grpc.http2.min_ping_interval_without_data_ms", self.peer_ping_ms // 2),
            *age,
        )


SERVER_OPTIONS: tuple[Option, ...] = (
    # Without this a second server could take the same port, and silently get some of the calls.
    ("grpc.so_reuseport", 0),
)

# For a server whose messages twinplane.grpc.messages reads: they come as they were sent, and are
# unpacked up to the limit of a message and not beyond. The library would unpack first, and measure
# what has come out.
LEFT_PACKED: Option = ("grpc.per_message_decompression", 0)

# The environment's HTTP proxy is meant for the web, not for a loopback or a cluster.
NO_PROXY: Option = ("grpc.enable_http_proxy", 0)

# gRPC measures the right window with pings, which come with nearly every message. They cost
# processor time, and a window that grows is memory that an unread message may take.
FIXED_WINDOW: Option = ("grpc.http2.bdp_probe", 0)

_WORKER_WINDOW_BYTES = 4 * 1024 * 1024
# For both ends of the worker's contract.
WORKER_CONNECTION_OPTIONS: tuple[Option, ...] = (
    ("grpc.max_send_message_length", WORKER_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", WORKER_MESSAGE_BYTES),
    # A fixed window that holds any usual step.
    FIXED_WINDOW,
    ("grpc.http2.lookahead_bytes", _WORKER_WINDOW_BYTES),
)

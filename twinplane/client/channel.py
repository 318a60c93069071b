"""How both clients connect."""

from __future__ import annotations

import grpc

from twinplane.client.values import TlsCredentials
from twinplane.grpc.options import NO_PROXY, Keepalive

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    # Short, so that a retry finds a restarted server again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # How long one attempt to connect may take: the address may be that of a machine that is gone.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # A server that vanished or froze is noticed within 10 seconds, also while a first token is
    # waited for. A server that is only silent answers: the library does that beside its event loop.
    *Keepalive(idle_ms=5_000, answer_ms=5_000).options(),
    ("grpc.http2.max_pings_without_data", 0),
    NO_PROXY,
)


def channel_credentials(credentials: TlsCredentials) -> grpc.ChannelCredentials:
    """gRPC's form of the credentials."""
    return grpc.ssl_channel_credentials(
        root_certificates=credentials.root_certificates,
        private_key=credentials.private_key,
        certificate_chain=credentials.certificate_chain,
    )

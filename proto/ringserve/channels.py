"""Options of gRPC channels to ringserve, and limits of a call that both of its sides keep.

Clients, gateways and the processes of a cluster use them. Constants and a pure function.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""gRPC's own limit is 4 MB, which a prompt of a million token ids reaches alone."""

MAX_METADATA_BYTES = 16 * 1024
"""Longest metadata of one call; a bearer token takes about 60 bytes of it."""

COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a shared port
)
"""Options of servers and channels."""

CHANNEL_OPTIONS = (
    *COMMON_OPTIONS,
    # By default gRPC waits up to two minutes between two attempts to connect, and 20 s for one to succeed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 250),
    # No limit on the number of pings in a row without data.
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of every channel that clients and processes of a cluster open; `keepalive` gives the others."""


def keepalive(interval: float, lost: float, *, is_always_on: bool) -> tuple[tuple[str, int], ...]:
    """Return channel options: pings every `interval` seconds; without answer for `lost` seconds, the connection closes.

    Its calls then fail with UNAVAILABLE. Without `is_always_on` a channel without calls sends no pings.
    """
    # gRPC 1.85 closes a connection by `ping_timeout_ms`, a minute by default, not by `keepalive_timeout_ms`.
    return (
        ("grpc.keepalive_time_ms", int(1000 * interval)),
        ("grpc.keepalive_timeout_ms", int(1000 * lost)),
        ("grpc.http2.ping_timeout_ms", int(1000 * lost)),
        ("grpc.keepalive_permit_without_calls", int(is_always_on)),
    )

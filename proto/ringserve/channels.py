"""Options of gRPC channels to ringserve, and limits of a call that both of its sides keep."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""A prompt of a million tokens is 4 MB, and gRPC's own default is 4 MB."""

MAX_METADATA_BYTES = 16 * 1024
"""Longest metadata of one call; a token takes 60 bytes."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use must be an error, not a shared port
)
"""Options of servers and channels."""

CHANNEL_OPTIONS = (
    *OPTIONS,
    # The defaults wait up to two minutes before they try again, and 20 s for each attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Pings while nothing else is sent, as often as needed.
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of every channel of ours, beside `keepalive`."""


def keepalive(interval: float, lost: float, *, is_always_on: bool) -> tuple[tuple[str, int], ...]:
    """Return channel options: a ping every `interval` seconds, and a connection without answer for `lost` is closed.

    Its calls then fail with UNAVAILABLE. Without `is_always_on` a channel without calls sends no pings.
    """
    # gRPC 1.85 closes a connection by `ping_timeout_ms`, a minute by default, not by `keepalive_timeout_ms`.
    return (
        ("grpc.keepalive_time_ms", int(1000 * interval)),
        ("grpc.keepalive_timeout_ms", int(1000 * lost)),
        ("grpc.http2.ping_timeout_ms", int(1000 * lost)),
        ("grpc.keepalive_permit_without_calls", int(is_always_on)),
    )

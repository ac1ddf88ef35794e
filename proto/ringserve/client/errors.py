"""Errors of both clients, in one tree under `RingserveError`; `ringserve.errors` draws it."""

from ringserve.errors import (
    Busy,
    CapacityExceeded,
    ConfigError,
    ConversationLost,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    NotBegun,
    NotFinite,
    NotFound,
    RingserveError,
    Stopping,
    TurnCancelled,
    Unauthenticated,
    Unavailable,
    Unreachable,
)

__all__ = [
    "Busy",
    "CapacityExceeded",
    "ConfigError",
    "ConversationLost",
    "DeadlineExceeded",
    "Forbidden",
    "InvalidRequest",
    "NotBegun",
    "NotFinite",
    "NotFound",
    "RingserveError",
    "Stopping",
    "TurnCancelled",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
]

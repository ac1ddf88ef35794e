"""Errors that every layer raises: the client errors of `ringserve.errors`, and errors inside a cluster.

RingserveError
├── the client errors, drawn in `ringserve.errors`
├── Unavailable
│   ├── StaleIncarnation  a message belongs to an earlier incarnation of a ring
│   └── DiskFull          a directory that is written to has no space left
├── TransferError         a KV transfer broke a rule: unknown, stale, overlapping, incomplete
├── ReshardError          a reshard plan would not deliver every token, layer and head exactly once
└── ModelRefused          the model cannot be loaded, or needs an operation that ringserve does not implement

`services.rpc.errors` maps each to one gRPC status code.
"""

from __future__ import annotations

from ringserve.errors import (
    Busy,
    CapacityExceeded,
    ConfigError,
    ContextTooLong,
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
    "LOSSES",
    "Busy",
    "CapacityExceeded",
    "ConfigError",
    "ContextTooLong",
    "ConversationLost",
    "DeadlineExceeded",
    "DiskFull",
    "Forbidden",
    "InvalidRequest",
    "ModelRefused",
    "NotBegun",
    "NotFinite",
    "NotFound",
    "ReshardError",
    "RingserveError",
    "StaleIncarnation",
    "Stopping",
    "TransferError",
    "TurnCancelled",
    "Unauthenticated",
    "Unavailable",
    "Unreachable",
]


class StaleIncarnation(Unavailable):
    """Message to or from an earlier incarnation of a ring."""


class DiskFull(Unavailable):
    """A directory has no space left; the failed operation works again once there is some."""


class TransferError(RingserveError):
    """KV transfer that broke a rule."""


LOSSES = (Unavailable, TransferError, NotFound)
"""Errors after which a turn counts its ring as lost, or the connection to it. The turn may continue on another ring."""


class ReshardError(RingserveError):
    """Reshard plan that would not deliver everything exactly once."""


class ModelRefused(RingserveError):
    """Model that cannot be served."""

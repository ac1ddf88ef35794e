"""Errors that code of every layer raises: those that clients know (`ringserve.errors`), and those within a cluster.

RingserveError
├── the errors of `ringserve.errors`, drawn there
├── Unavailable
│   └── StaleIncarnation  a message was meant for (or came from) an earlier life of a ring
├── TransferError         a KV transfer broke a rule: unknown, stale, overlapping, incomplete
├── ReshardError          a reshard plan would not deliver every token, layer and head exactly once
└── ModelRefused          the model needs something the core does not have, or cannot be loaded

`services.rpc.errors` maps each to one gRPC status code.
"""

from __future__ import annotations

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
    "LOSSES",
    "Busy",
    "CapacityExceeded",
    "ConfigError",
    "ConversationLost",
    "DeadlineExceeded",
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
    """Message for, or from, an earlier life of a ring."""


class TransferError(RingserveError):
    """KV transfer that broke a rule."""


LOSSES = (Unavailable, TransferError, NotFound)
"""Errors of a turn by which one of its rings, or the way to it, may be lost: the turn may go on elsewhere."""


class ReshardError(RingserveError):
    """Reshard plan that would not deliver everything exactly once."""


class ModelRefused(RingserveError):
    """Model that cannot be served."""

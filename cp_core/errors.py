"""Every error a user of ringserve can meet.

RingserveError
├── InvalidRequest        a field of the request is wrong: the message names field, value and what is allowed
├── Unauthenticated       no token, or one that is wrong or has expired
├── Forbidden             the caller is known and may not do this
├── NotFound              no such conversation, request or turn
├── Busy                  the conversation has a turn running
├── CapacityExceeded      no free KV, batch slot or place in a queue now; the same request may succeed later
├── DeadlineExceeded      the turn's own deadline passed
├── TurnCancelled         the client, or an Abort, ended the turn
├── Unavailable           a ring, rank or peer is down or being rebuilt
│   ├── NotBegun          so the turn was refused whole, and may be asked for again
│   └── StaleIncarnation  a message was meant for (or came from) an earlier life of a ring
├── TransferError         a KV transfer broke a rule: unknown, stale, overlapping, incomplete
├── ReshardError          a reshard plan would not deliver every token, layer and head exactly once
├── ModelRefused          the model needs something the core does not have, or cannot be loaded
└── ConfigError           the configuration is wrong: the message names key, value and what is allowed

`services.rpc.errors` maps each to one gRPC status code.
"""


class RingserveError(Exception):
    """Base of the tree. The message is one sentence that may be shown to a client."""


class InvalidRequest(RingserveError):
    """A field of the request is wrong."""


class Unauthenticated(RingserveError):
    """No token, or one that is wrong or has expired."""


class Forbidden(RingserveError):
    """The caller is known and may not do this."""


class NotFound(RingserveError):
    """No such conversation, request or turn."""


class Busy(RingserveError):
    """The conversation has a turn running."""


class CapacityExceeded(RingserveError):
    """No free KV, batch slot or place in a queue now; room is expected in `retry_after_seconds`, if that is known."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(RingserveError):
    """The turn's deadline passed."""


class TurnCancelled(RingserveError):
    """The client, or an Abort, ended the turn."""


class Unavailable(RingserveError):
    """A ring, rank or peer is down or being rebuilt."""


class NotBegun(Unavailable):
    """The turn was refused before anything of it was done: its conversation is as it was."""


class StaleIncarnation(Unavailable):
    """A message was meant for, or came from, an earlier life of a ring."""


class TransferError(RingserveError):
    """A KV transfer broke a rule."""


class ReshardError(RingserveError):
    """A reshard plan would not deliver everything exactly once."""


class ModelRefused(RingserveError):
    """The model cannot be served."""


class ConfigError(RingserveError):
    """The configuration is wrong."""

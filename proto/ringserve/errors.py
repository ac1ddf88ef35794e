"""Errors that a call of ringserve can end with, in one tree. Servers and clients have the same classes.

RingserveError
├── InvalidRequest        a field of the request is wrong: the message names field, value and what is allowed
│   └── ContextTooLong    prompt and answer have more tokens than fit; a shorter history would
├── Unauthenticated       no token, or one that is wrong or has expired
├── Forbidden             the caller is known and may not do this
├── NotFound              no such conversation, request or turn
├── ConversationLost      a conversation remembers another number of tokens than its client expects
├── Busy                  a conversation, request id, KV sequence or ring is in use; retry later
├── CapacityExceeded      no free KV, batch slot or place in a queue now; the same request may succeed later
├── DeadlineExceeded      the turn's own deadline passed
├── TurnCancelled         the client, or an Abort, ended the turn
├── Unavailable           a ring, rank or peer is down or being rebuilt
│   ├── Unreachable       the connection to a peer is cut, or the peer is gone; it may have received the call
│   ├── Stopping          the gateway is stopping and ends its turns; they may go on at another gateway
│   └── NotBegun          the turn was refused before any work; the same request may be sent again
├── NotFinite             the model's logits for one turn are NaN or infinite; the same request would fail again
└── ConfigError           a setting of this program or of the service is wrong: the message names key and value

`cp_core.errors` adds the errors between the processes of a cluster, and `services.rpc.errors` maps each to a gRPC code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ERROR_KEY = "ringserve-error"
"""Trailing metadata that names the error class, so that the caller raises the same error."""

RETRY_KEY = "retry-after-ms"
"""Trailing metadata of a refusal: milliseconds until room is likely."""


class RingserveError(Exception):
    """Base of the tree. The message is one sentence that may be shown to a client."""


class InvalidRequest(RingserveError):
    """Request with a wrong field."""


class ContextTooLong(InvalidRequest):
    """Request whose prompt and answer have more tokens than the model's positions, or a ring's KV room, allow."""


class Unauthenticated(RingserveError):
    """Call without a token, or with one that is wrong or has expired."""


class Forbidden(RingserveError):
    """Call of a known caller who may not do this."""


class NotFound(RingserveError):
    """Name of a conversation, request or turn that does not exist."""


class ConversationLost(RingserveError):
    """Conversation with another number of tokens than its client expects: the prompt would follow the wrong history."""


class Busy(RingserveError):
    """Conversation, request id, KV sequence or ring that is in use."""


class CapacityExceeded(RingserveError):
    """Lack of free KV, batch slots or queue places now. `retry_after_seconds` says when room is expected, if known."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(RingserveError):
    """Turn whose own deadline has passed."""


class TurnCancelled(RingserveError):
    """Turn that the client, or an Abort, has ended."""


class Unavailable(RingserveError):
    """Ring, rank or peer that is down or being rebuilt."""


class Unreachable(Unavailable):
    """Peer to which the connection is cut, or that is gone."""


class Stopping(Unavailable):
    """Gateway that is stopping and ends its turns; they may go on at another gateway."""


class NotBegun(Unavailable):
    """Turn that was refused before any work; its conversation is unchanged."""


class NotFinite(RingserveError):
    """Turn for which the model's logits are NaN or infinite; others in its batch go on."""

    @classmethod
    def of_turn(cls, turn_id: str, position: int) -> NotFinite:
        """Return the error of a turn whose token at `position` could not be sampled."""
        return cls(
            f"the model's logits for position {position} of turn {turn_id} are not finite (NaN or infinite), so the "
            f"turn has failed; the same request would fail again"
        )


class ConfigError(RingserveError):
    """Setting with a wrong key or value."""


SHARED = (
    *(InvalidRequest, ContextTooLong, Unauthenticated, Forbidden, NotFound, ConversationLost, Busy, CapacityExceeded),
    *(DeadlineExceeded, TurnCancelled, Unavailable, Stopping, NotBegun, NotFinite, ConfigError),
)
"""Errors that servers name to clients. Unreachable is not among them: it is raised by a caller that cannot reach its
peer."""


def read_error(
    failure: Any, kinds: Mapping[str, type[RingserveError]], default: type[RingserveError]
) -> RingserveError | None:
    """Return the error that a failed call's trailing metadata names; None: gRPC itself failed.

    `kinds` are the known errors by the names of their classes; another name becomes `default`.
    """
    metadata = {key: str(value) for key, value in failure.trailing_metadata() or ()}
    if ERROR_KEY not in metadata:
        return None
    error = kinds.get(metadata[ERROR_KEY], default)(failure.details() or "")
    hint = metadata.get(RETRY_KEY, "")
    if isinstance(error, CapacityExceeded) and hint.isascii() and hint.isdigit():
        error.retry_after_seconds = int(hint) / 1000
    return error

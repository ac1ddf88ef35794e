"""What the router and the leaders say to each other about kept KV: fetch it, share it, tell of it. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.layout.shards import ShardMap, TokenRange


@dataclass(frozen=True, kw_only=True, slots=True)
class SendKv:
    """Send kept KV of `tokens` to a ring whose ranks, of `tp` processes each, expect it as `shards` lay it.

    `turn_id` is of the turn that holds the sequence where it is kept; empty where none does.
    """

    transfer_id: str
    attempt: int
    kv_id: str
    turn_id: str = ""
    source_incarnation: str
    destination_incarnation: str
    tokens: TokenRange
    shards: ShardMap
    kv_endpoints: tuple[str, ...]
    deadline_seconds: float
    tp: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SentKv:
    """What a transfer moved."""

    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeKv:
    """Fetch the first `num_tokens` tokens of a sequence that another ring keeps, and keep them. `deadline_seconds` are
    for the bytes; once a transfer has failed it takes another `attempt`, or another id.
    """

    transfer_id: str
    attempt: int
    kv_id: str
    num_tokens: int
    source_role: str
    source_endpoint: str
    source_incarnation: str
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenKv:
    """Where a sequence lies that a ring has taken over from another."""

    incarnation: str
    shards: ShardMap
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkKv:
    """Begin a sequence with the kept KV of another's first `num_tokens` tokens."""

    source_id: str
    kv_id: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedKv:
    """What of it was there, and is now there for both."""

    incarnation: str
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedKv:
    """How many tokens of each sequence that was asked for have their KV on this incarnation of a ring."""

    incarnation: str
    num_tokens: tuple[int, ...]

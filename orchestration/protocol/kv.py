"""Messages between router and leaders about retained KV: send it, take it over, share it, count it. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.workers.protocol.transfers import TransferKey


@dataclass(frozen=True, kw_only=True, slots=True)
class SendKv:
    """Request to send retained KV of `tokens` to a ring whose ranks expect it as `shards` lay it.

    Each rank there is `tp` processes. `turn_id` is of the turn that holds the KV on the source; empty if none does.
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

    @property
    def key(self) -> TransferKey:
        """Key of the transfer on the ranks of both rings."""
        return TransferKey(self.transfer_id, self.attempt, self.source_incarnation, self.destination_incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentKv:
    """Size and duration of a transfer."""

    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeKv:
    """Request to fetch the KV of the first `num_tokens` tokens from another ring, and to retain it.

    `deadline_seconds` are for the bytes. After a failed transfer the next one takes another `attempt`, or another id.
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
    """Location of KV that a ring has taken over from another."""

    incarnation: str
    shards: ShardMap
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkKv:
    """Request to begin `kv_id` with the retained KV of the first `num_tokens` tokens of `source_id`."""

    source_id: str
    kv_id: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedKv:
    """Part of the source's KV that was there, and that both share now."""

    incarnation: str
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedKv:
    """Number of tokens, for each id asked for, whose KV is on this incarnation of a ring."""

    incarnation: str
    num_tokens: tuple[int, ...]

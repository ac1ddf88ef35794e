"""Messages by which a ring tells a restarted router which turns and KV it holds. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.layout.shards import ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOnRing:
    """Sequence whose KV was on the ring before the turn that uses it, if any. `last_turn` wrote the last of it."""

    kv_id: str
    last_turn: str
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOnRing:
    """Turn that holds KV on the ring, or whose end the ring has not told yet.

    `retained_tokens` of the sequence were there before. `is_begun`: the ring computes the prompt, or has. `is_sealed`:
    a decode ring had the KV of the whole prompt.
    """

    turn_id: str
    kv_id: str
    attempt: int
    retained_tokens: int
    is_begun: bool = False
    is_sealed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RingInventory:
    """Everything that a ring holds."""

    sequences: tuple[SequenceOnRing, ...]
    turns: tuple[TurnOnRing, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownEpoch:
    """Epoch of the router that a ring has told its inventory, or tells it now."""

    epoch: int = 0
    inventory: RingInventory | None = None


UNKNOWN_EPOCH = KnownEpoch()


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Answer to an announcement.

    `running_turns` run or start on the ring; while it drains, conversations that are still to be moved count as well.
    A ring that does not know the router's `epoch` is registered when it has told its inventory.
    """

    running_turns: int
    epoch: int = 0

"""Messages by which a ring tells a restarted router which turns and KV it holds. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.layout.shards import ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOnRing:
    """Sequence whose KV the ring retains. If a turn uses it, only KV from before that turn counts.

    `last_turn` is the turn that wrote the newest of this KV.
    """

    kv_id: str
    last_turn: str
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOnRing:
    """Turn that holds KV on the ring, or has ended there without the router's knowledge.

    `retained_tokens` of its sequence were retained before the turn. `is_begun`: the ring computes the prompt, or has
    computed it. `is_sealed`: the ring is a decode ring and has the KV of the whole prompt.
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
    """Epoch of the router to which a ring has sent its inventory, or sends this `inventory`."""

    epoch: int = 0
    inventory: RingInventory | None = None


UNKNOWN_EPOCH = KnownEpoch()


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Answer to an announcement.

    `running_turns` counts the turns that run or start on the ring and, while it drains, the conversations that are
    still to be moved. A ring that named another epoch than the router's `epoch` is not registered: it must announce
    itself again, with its inventory.
    """

    running_turns: int
    epoch: int = 0

"""Where a conversation's KV lies: one frozen map for each state, numbered by epochs.

    epoch 0: nowhere  --a turn, a fork, a move, a turn that failed-->  epoch 1  -->  epoch 2  --> ...

Whoever changes it makes the next map of the one before, so that all of a change is seen, or nothing of it. The map says
where KV was put. Rings may have evicted it since, and one that was rebuilt has another incarnation and nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cp_core.layout.shards import ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLocation:
    """Tokens [0, num_tokens) have their KV on one incarnation of one ring; so since `epoch` of the conversation's map.

    `shards` lay them over the ring's ranks, however many it has.
    """

    ring: str
    incarnation: str
    shards: ShardMap
    epoch: int = 0

    @property
    def num_tokens(self) -> int:
        return self.shards.num_tokens

    def cut(self, num_tokens: int) -> KvLocation:
        """At most so many tokens of it."""
        return self if num_tokens >= self.num_tokens else replace(self, shards=self.shards.truncate(num_tokens))


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLocations:
    """At most one ring of each role holds KV of a conversation between its turns. `epoch` grows with every change."""

    epoch: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None

    def at(self, role: str) -> KvLocation | None:
        """On the ring of that role."""
        return self.prefill if role == "prefill" else self.decode

    def items(self) -> Iterator[tuple[str, KvLocation]]:
        """Role and placement of each that there is."""
        for role in ("prefill", "decode"):
            if (place := self.at(role)) is not None:
                yield role, place

    def put(self, role: str, place: KvLocation | None) -> KvLocations:
        """The next map, with the KV of one role elsewhere; None: nowhere."""
        if role == "prefill":
            return self.changed(prefill=place, decode=self.decode)
        return self.changed(prefill=self.prefill, decode=place)

    def changed(self, *, prefill: KvLocation | None, decode: KvLocation | None) -> KvLocations:
        """The next map. What stays as it was keeps the epoch from which on it was so."""
        epoch = self.epoch + 1
        return KvLocations(
            epoch=epoch, prefill=_since(epoch, self.prefill, prefill), decode=_since(epoch, self.decode, decode)
        )


def _since(epoch: int, before: KvLocation | None, place: KvLocation | None) -> KvLocation | None:
    return place if place is None or place == before else replace(place, epoch=epoch)

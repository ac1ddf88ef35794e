"""Which conversations a simulated ring holds KV of, by tokens. As in a real pool the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict


class KeptKv:
    """`capacity` tokens of a ring. A conversation is pinned while a turn of it runs, and kept afterwards."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._pinned: dict[int, int] = {}
        self._used = 0
        self.num_pinned_tokens = 0

    def held(self, conversation: int) -> int:
        """Tokens of it that are here."""
        return self._kept.get(conversation, 0)

    def try_pin(self, conversation: int, tokens: int) -> bool:
        """Room for `tokens` of the conversation, kept ones of others evicted if need be. False, and nothing changed,
        where running turns leave less.
        """
        if self.num_pinned_tokens + tokens > self.capacity:
            return False
        self._used += tokens - self._kept.pop(conversation, 0)
        self._pinned[conversation] = tokens
        self.num_pinned_tokens += tokens
        while self._used > self.capacity:
            _, evicted = self._kept.popitem(last=False)
            self._used -= evicted
        return True

    def settle(self, conversation: int, keep: int) -> None:
        """The turn has ended: its first `keep` tokens stay while there is room."""
        pinned = self._pinned.pop(conversation)
        self.num_pinned_tokens -= pinned
        self._used += keep - pinned
        if keep:
            self._kept[conversation] = keep

    def drop(self, conversation: int) -> None:
        """What is kept of it is freed. Idempotent."""
        self._used -= self._kept.pop(conversation, 0)

    def check_integrity(self) -> None:
        """Nothing is counted twice or lost, and nothing is beyond the capacity."""
        assert self.num_pinned_tokens == sum(self._pinned.values()), "pinned tokens do not add up"
        assert self._used == sum(self._kept.values()) + self.num_pinned_tokens, "tokens do not add up"
        assert self._used <= self.capacity, "more is held than fits"
        assert not self._kept.keys() & self._pinned.keys(), "a conversation is both kept and pinned"

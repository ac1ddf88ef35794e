"""Staging slots between the cache and a peer.

A source packs a frame's payload into an out slot, and a destination reads it into its own landing slot, so a peer never
reads or writes the cache. A rank's `PullAgent` owns its slots.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ringserve.cp_core.errors import Unavailable
from ringserve.workers.kv.cache import KvCache
from ringserve.workers.kv.frames import FrameLayout, SlotRef


class SlotPool:
    """Pool of slots 0 to `num_slots` - 1, each lent to one holder until `release`. Thread-safe.

    A holder has at most `max_held` slots. The lowest free slot is lent first, to touch as little memory as possible.
    """

    def __init__(self, num_slots: int, max_held: int) -> None:
        self._free = list(range(num_slots))
        self._num_usable = num_slots
        self._max_held = max_held
        self._holders: dict[int, object] = {}
        self._held: Counter[object] = Counter()
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    @property
    def is_used_up(self) -> bool:
        """True if every slot is lost."""
        with self._changed:
            return not self._num_usable

    def take(self, holder: object, seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> int:
        """Lend a slot. Raises Unavailable after `seconds`, or if `is_stopped` returns True (see `wake`)."""

        def is_over() -> bool:
            return self._is_closed or not self._num_usable or is_stopped()

        with self._changed:
            self._changed.wait_for(lambda: is_over() or self._has_one(holder), seconds)
            if self._is_closed or is_stopped():
                raise Unavailable("no staging slot for KV: its connection has ended")
            if not self._has_one(holder):
                raise Unavailable(f"no staging slot for KV: none of {self._num_usable} is free after {seconds:g} s")
            slot = heapq.heappop(self._free)
            self._holders[slot] = holder
            self._held[holder] += 1
            self._changed.notify_all()
            return slot

    def release(self, slot: int) -> None:
        """Take a slot back, so that it may be lent again."""
        with self._changed:
            self._forget(slot)
            heapq.heappush(self._free, slot)
            self._changed.notify_all()

    def lose(self, slot: int) -> None:
        """Never lend a slot again, because bytes may still arrive there."""
        with self._changed:
            self._forget(slot)
            self._num_usable -= 1
            self._changed.notify_all()

    def wake(self) -> None:
        """Make waits check their `is_stopped` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_one(self, holder: object) -> bool:
        return bool(self._free) and self._held[holder] < self._max_held

    def _forget(self, slot: int) -> None:
        holder = self._holders.pop(slot)
        self._held[holder] -= 1
        if not self._held[holder]:
            del self._held[holder]


class OutSlots(SlotPool):
    """Out slots of a source: `memory` (bytes, on the cache's device) and `words`, one int64 per slot on the host.

    A slot's word is its generation: odd while the slot is written, even and larger afterwards. A peer reads the word
    after reading the slot, and so notices a reused slot. Each destination holds at most half of the slots, so that a
    destination that does not read cannot block others.
    """

    def __init__(self, num_slots: int, slot_bytes: int, device: torch.device) -> None:
        super().__init__(num_slots, max(1, num_slots // 2))
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.memory = torch.empty(num_slots * slot_bytes, dtype=torch.uint8, device=device)
        self.words = torch.zeros(num_slots, dtype=torch.int64)

    def fill(self, slot: int, layout: FrameLayout, layers: range, cache: KvCache) -> torch.Tensor:
        """Pack a frame's payload of some layers into a slot and return those bytes. Call it in `CopyStream.copying`."""
        begin = slot * self.slot_bytes
        return layout.pack(layers, cache, self.memory[begin : begin + self.slot_bytes])

    @contextmanager
    def writing(self, slot: int) -> Iterator[None]:
        """Mark a slot as being written inside the `with` block."""
        # The word is already odd if the last write failed.
        self.words[slot] += 1 + self.words[slot] % 2
        yield
        self.words[slot] += 1

    def ref(self, slot: int, num_bytes: int) -> SlotRef:
        """Return the place of `num_bytes` written to a slot."""
        return SlotRef(slot, int(self.words[slot]), num_bytes)

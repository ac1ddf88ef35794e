"""Order in which turns would take the rings, updated as they change: a choice looks at a few of hundreds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from ringserve.orchestration.placement.registry import RegisteredRing, RingKind

Item = TypeVar("Item")

SLACK = 64
"""Entries of a heap beyond twice its items, above which outdated entries are removed."""


class Ordered(Generic[Item]):
    """Heap in which an item's latest entry counts; earlier entries are skipped when they reach the top.

    Keys of one heap compare with each other, and no two items in it have equal keys.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._latest: dict[Item, int] = {}
        self._entries = count()

    def __len__(self) -> int:
        return len(self._latest)

    def put(self, item: Item, key: object) -> None:
        """Enter the item, or move it."""
        number = next(self._entries)
        self._latest[item] = number
        heapq.heappush(self._heap, (key, number, item))
        if len(self._heap) > 2 * len(self._latest) + SLACK:
            self._heap = [entry for entry in self._heap if self._latest.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Remove the item. Idempotent."""
        self._latest.pop(item, None)

    def first(self, accepts: Callable[[Item], bool]) -> Item | None:
        """Return the accepted item of the least key. Takes as long as there are items of lesser keys."""
        refused = []
        found = None
        while self._heap:
            entry = self._heap[0]
            _, number, item = entry
            if self._latest.get(item) != number:
                heapq.heappop(self._heap)
            elif accepts(item):
                found = item
                break
            else:
                refused.append(heapq.heappop(self._heap))
        for entry in refused:
            heapq.heappush(self._heap, entry)
        return found


Accepts = Callable[["RegisteredRing"], bool]


class RingOrder:
    """Order of rings. A ring enters itself in `changed` when its place may change, and is placed at the next choice.

    A choice takes longer with each better ring that is not accepted, not with the number of rings.
    """

    def __init__(self) -> None:
        self.changed: set[RegisteredRing] = set()
        self._prefill: dict[RingKind, _PrefillQueues] = {}
        self._queues_of: dict[RegisteredRing, _PrefillQueues] = {}
        self._decode: Ordered[RegisteredRing] = Ordered()

    def remove(self, ring: RegisteredRing) -> None:
        """Remove a ring that has left. Its later changes, as its last turns end, are ignored."""
        self.changed.discard(ring)
        ring.leave()
        self._decode.discard(ring)
        if (queues := self._queues_of.pop(ring, None)) is not None:
            queues.discard(ring)

    def least_busy(self, now: float, accepts: Accepts) -> list[RegisteredRing]:
        """Return the prefill ring of each kind that will be idle first, among those accepted, in order of arrival.

        Of idle ones it is the one without a turn for longest.
        """
        self._enter_changed()
        found = (queues.first(now, accepts) for queues in self._prefill.values())
        return sorted((ring for ring in found if ring is not None), key=lambda ring: ring.number)

    def least_loaded(self, accepts: Accepts) -> RegisteredRing | None:
        """Return the decode ring of the least load among those accepted.

        Of equals it is the one without a turn for longest.
        """
        self._enter_changed()
        return self._decode.first(accepts)

    def _enter_changed(self) -> None:
        for ring in self.changed:
            if ring.role == "decode":
                self._decode.put(ring, (ring.load_seconds, ring.last_placed, ring.number))
            else:
                self._enter_prefill(ring)
        self.changed.clear()

    def _enter_prefill(self, ring: RegisteredRing) -> None:
        queues = self._prefill.get(ring.kind)
        if queues is None:
            queues = self._prefill[ring.kind] = _PrefillQueues()
        before = self._queues_of.get(ring)
        if before is not None and before is not queues:
            before.discard(ring)
        self._queues_of[ring] = queues
        queues.put(ring)


class _PrefillQueues:
    """Prefill rings of one kind: busy ones by when they end, idle ones by when they last had a turn."""

    def __init__(self) -> None:
        self._busy: Ordered[RegisteredRing] = Ordered()
        self._idle: Ordered[RegisteredRing] = Ordered()

    def put(self, ring: RegisteredRing) -> None:
        self._idle.discard(ring)
        self._busy.put(ring, (ring.busy_until, ring.last_placed, ring.number))

    def discard(self, ring: RegisteredRing) -> None:
        self._busy.discard(ring)
        self._idle.discard(ring)

    def first(self, now: float, accepts: Accepts) -> RegisteredRing | None:
        while (ended := self._busy.first(_any)) is not None and ended.busy_until <= now:
            self._busy.discard(ended)
            self._idle.put(ended, (ended.last_placed, ended.number))
        return self._idle.first(accepts) or self._busy.first(accepts)


def _any(ring: RegisteredRing) -> bool:
    return True

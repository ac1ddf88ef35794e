"""Items by a key that changes, the least of them found without looking at all. Pure Python."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

SLACK = 64
"""Entries beyond twice the items that a heap may hold before those that no longer count are thrown out."""


class Ordered(Generic[Item]):
    """A heap in which an item's latest entry counts; those before it are passed over when they come to the top.

    Keys of one heap compare with each other, and no two items that are in it have equal ones.
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
        """Idempotent."""
        self._latest.pop(item, None)

    def first(self, accepts: Callable[[Item], bool]) -> Item | None:
        """The item of the least key that is accepted. Takes as long as there are items of lesser keys."""
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

"""Rings in the order in which a turn would take them, kept while they change: a choice among hundreds looks at few."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestration.placement.ordered import Ordered

if TYPE_CHECKING:
    from orchestration.placement.registry import RegisteredRing, RingKind

Accepts = Callable[["RegisteredRing"], bool]


class RingOrder:
    """Rings enter themselves in `changed` when their place may be another one; they are put there when it is asked for.

    How long an answer takes grows with the rings before it that were not accepted, not with all of them.
    """

    def __init__(self) -> None:
        self.changed: set[RegisteredRing] = set()
        self._prefill: dict[RingKind, _PrefillQueues] = {}
        self._queues_of: dict[RegisteredRing, _PrefillQueues] = {}
        self._decode: Ordered[RegisteredRing] = Ordered()

    def remove(self, ring: RegisteredRing) -> None:
        """It has left, for good: what changes of it afterwards, as its last turns end, is of no interest."""
        self.changed.discard(ring)
        ring.leave()
        self._decode.discard(ring)
        if (queues := self._queues_of.pop(ring, None)) is not None:
            queues.discard(ring)

    def least_busy(self, now: float, accepts: Accepts) -> list[RegisteredRing]:
        """Of each kind of prefill ring that which will be idle first, of idle ones that which had no turn the longest;
        of those that are accepted. In the order in which they came.
        """
        self._enter_changed()
        found = (queues.first(now, accepts) for queues in self._prefill.values())
        return sorted((ring for ring in found if ring is not None), key=lambda ring: ring.number)

    def least_loaded(self, accepts: Accepts) -> RegisteredRing | None:
        """The decode ring of the least load, of equals that which had no turn the longest; of those accepted."""
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
    """Prefill rings of one kind: those that compute by when they end, idle ones by when they last had a turn."""

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

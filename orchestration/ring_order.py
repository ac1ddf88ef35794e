"""Rings in the order in which a turn would take them, kept while they change: a choice among hundreds looks at few."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestration.ordered import Ordered

if TYPE_CHECKING:
    from orchestration.groups import Group, RingKind

Accepts = Callable[["Group"], bool]


class RingOrder:
    """Rings enter themselves in `changed` when their place may be another one; they are put there when it is asked for.

    How long an answer takes grows with the rings before it that were not accepted, not with all of them.
    """

    def __init__(self) -> None:
        self.changed: set[Group] = set()
        self._prefill: dict[RingKind, _PrefillQueues] = {}
        self._queues_of: dict[Group, _PrefillQueues] = {}
        self._decode: Ordered[Group] = Ordered()

    def remove(self, group: Group) -> None:
        """It has left, for good: what changes of it afterwards, as its last turns end, is of no interest."""
        self.changed.discard(group)
        group.leave()
        self._decode.discard(group)
        if (queues := self._queues_of.pop(group, None)) is not None:
            queues.discard(group)

    def least_busy(self, now: float, accepts: Accepts) -> list[Group]:
        """Of each kind of prefill ring that which will be idle first, of idle ones that which had no turn the longest;
        of those that are accepted. In the order in which they came.
        """
        self._enter_changed()
        found = (queues.first(now, accepts) for queues in self._prefill.values())
        return sorted((group for group in found if group is not None), key=lambda group: group.number)

    def least_loaded(self, accepts: Accepts) -> Group | None:
        """The decode ring of the least load, of equals that which had no turn the longest; of those accepted."""
        self._enter_changed()
        return self._decode.first(accepts)

    def _enter_changed(self) -> None:
        for group in self.changed:
            if group.role == "decode":
                self._decode.put(group, (group.load_seconds, group.last_placed, group.number))
            else:
                self._enter_prefill(group)
        self.changed.clear()

    def _enter_prefill(self, group: Group) -> None:
        queues = self._prefill.get(group.kind)
        if queues is None:
            queues = self._prefill[group.kind] = _PrefillQueues()
        before = self._queues_of.get(group)
        if before is not None and before is not queues:
            before.discard(group)
        self._queues_of[group] = queues
        queues.put(group)


class _PrefillQueues:
    """Prefill rings of one kind: those that compute by when they end, idle ones by when they last had a turn."""

    def __init__(self) -> None:
        self._busy: Ordered[Group] = Ordered()
        self._idle: Ordered[Group] = Ordered()

    def put(self, group: Group) -> None:
        self._idle.discard(group)
        self._busy.put(group, (group.busy_until, group.last_placed, group.number))

    def discard(self, group: Group) -> None:
        self._busy.discard(group)
        self._idle.discard(group)

    def first(self, now: float, accepts: Accepts) -> Group | None:
        while (ended := self._busy.first(_any)) is not None and ended.busy_until <= now:
            self._busy.discard(ended)
            self._idle.put(ended, (ended.last_placed, ended.number))
        return self._idle.first(accepts) or self._busy.first(accepts)


def _any(group: Group) -> bool:
    return True

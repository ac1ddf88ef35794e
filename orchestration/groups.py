"""The rings a router can use, as they announced themselves."""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.errors import Unavailable
from orchestration.conversations import Placement
from orchestration.turn import GroupRegistration


@dataclass(slots=True)
class Group:
    """One ring. `is_ready` falls when a call finds it gone and rises with its next announcement."""

    registration: GroupRegistration
    is_ready: bool = True
    num_turns: int = 0

    @property
    def takes_turns(self) -> bool:
        return self.is_ready and not self.registration.is_draining

    @property
    def name(self) -> str:
        return self.registration.name


class GroupRegistry:
    """All rings by role and name."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Group]] = {"prefill": {}, "decode": {}}
        self._left: dict[str, str] = {}  # incarnations of rings that have said good-bye, by name

    def register(self, registration: GroupRegistration) -> bool:
        """Enter a ring, its new incarnation, that it still lives, drains or leaves. True where it is news."""
        groups, name = self._groups[registration.role], registration.name
        known = groups.get(name)
        if self._left.get(name) == registration.incarnation:
            return False  # told before it left, and late
        if registration.is_leaving:
            self._left[name] = registration.incarnation
            return groups.pop(name, None) is not None
        self._left.pop(name, None)
        if known is None:
            groups[name] = Group(registration)
            return True
        before = known.registration
        is_news = before.incarnation != registration.incarnation or not known.is_ready
        is_news = is_news or before.is_draining != registration.is_draining
        known.registration, known.is_ready = registration, True
        return is_news

    def all(self) -> list[Group]:
        return [*self._groups["prefill"].values(), *self._groups["decode"].values()]

    def find(self, name: str) -> Group | None:
        """A ring of either role."""
        return self._groups["prefill"].get(name) or self._groups["decode"].get(name)

    def has_left(self, name: str) -> bool:
        """Whether a ring of that name was here, drained and left."""
        return name in self._left

    def named(self, role: str, name: str) -> Group | None:
        return self._groups[role].get(name)

    def choose(self, role: str, placement: Placement | None) -> Group:
        """The ring that holds the conversation's KV, else the one with the fewest turns. Raises Unavailable."""
        ready = [group for group in self._groups[role].values() if group.takes_turns]
        if not ready:
            raise Unavailable(f"no {role} ring is ready; retry in a few seconds")
        if placement is not None:
            for group in ready:
                if group.name == placement.group and group.registration.incarnation == placement.incarnation:
                    return group
        return min(ready, key=lambda group: (group.num_turns, group.name))

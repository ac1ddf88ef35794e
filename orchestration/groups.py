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
    def name(self) -> str:
        return self.registration.name


class GroupRegistry:
    """All rings by role and name."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Group]] = {"prefill": {}, "decode": {}}

    def register(self, registration: GroupRegistration) -> bool:
        """Enter a ring, or its new incarnation, or that it still lives. True where it is news."""
        groups = self._groups[registration.role]
        known = groups.get(registration.name)
        if known is None:
            groups[registration.name] = Group(registration)
            return True
        is_news = known.registration.incarnation != registration.incarnation or not known.is_ready
        known.registration, known.is_ready = registration, True
        return is_news

    def all(self) -> list[Group]:
        return [*self._groups["prefill"].values(), *self._groups["decode"].values()]

    def named(self, role: str, name: str) -> Group | None:
        return self._groups[role].get(name)

    def choose(self, role: str, placement: Placement | None) -> Group:
        """The ring that holds the conversation's KV, else the one with the fewest turns. Raises Unavailable."""
        ready = [group for group in self._groups[role].values() if group.is_ready]
        if not ready:
            raise Unavailable(f"no {role} ring is ready; retry in a few seconds")
        if placement is not None:
            for group in ready:
                if group.name == placement.group and group.registration.incarnation == placement.incarnation:
                    return group
        return min(ready, key=lambda group: (group.num_turns, group.name))

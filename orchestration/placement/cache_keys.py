"""The rings that each cache key's latest turn went to, for the placer.

Clients give requests the same key if their prompts probably begin alike.
"""

from __future__ import annotations

from collections import OrderedDict

from ringserve.orchestration.placement.kv_locations import Choice
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry

MAX_KEYS = 100_000


class KeyedRings:
    """Names of the rings that the latest turn of each key went to, for the `max_keys` keys used most recently."""

    def __init__(self, rings: RingRegistry, max_keys: int = MAX_KEYS) -> None:
        self._rings = rings
        self._max_keys = max_keys
        self._names: OrderedDict[str, dict[str, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    def note(self, key: str, choice: Choice) -> None:
        """Note the rings of a turn."""
        self._names[key] = {"prefill": choice.prefill.name, "decode": choice.decode.name}
        self._names.move_to_end(key)
        if len(self._names) > self._max_keys:
            self._names.popitem(last=False)

    def of(self, key: str, role: str) -> RegisteredRing | None:
        """Return the key's ring of a role, if that ring is still there."""
        names = self._names.get(key)
        return None if names is None else self._rings.named(role, names[role])

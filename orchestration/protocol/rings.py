"""States and events of rings that several rooms share. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ROLES = ("prefill", "decode")
AWAY = "away"
"""What operators are shown as the state of a ring that has left and is to come back."""


class RingState(StrEnum):
    """States of a ring; `orchestration.ring.life` draws the transitions."""

    STARTING = "starting"
    READY = "ready"
    REBUILDING = "rebuilding"
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class RingEvent:
    """A ring that whoever started it has something to do for: it has drained, or it is wanted again.

    Where it is wanted again, that is when the nodes at the addresses `leaving_nodes` are gone.
    """

    ring: str
    leaving_nodes: tuple[str, ...] = ()

"""Where the time of a turn went, for whoever collects traces. What happens to it is not the business of the rings.

A turn's `trace_parent` (W3C Trace Context) goes with it from the gateway to the leaders. Where it is empty nobody wants
to know. What a ring did is told once, when the turn has left the ring: no step carries anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Something that is over. Times are those of `time.monotonic`; `parts` lie within it."""

    name: str
    began: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    parts: tuple[Stretch, ...] = ()


def just_ended(name: str, seconds: float, attributes: Attributes) -> Stretch:
    """What took so long and is over now."""
    now = time.monotonic()
    return Stretch(name=name, began=now - seconds, ended=now, attributes=attributes)


class Tracer(Protocol):
    """Takes what happened to a turn."""

    def record(self, trace_parent: str, stretches: Sequence[Stretch]) -> None:
        """Stretches of the turn whose trace this continues; an empty `trace_parent` is of none. Never waits."""


class NoTracer:
    """Where no traces are collected."""

    def record(self, trace_parent: str, stretches: Sequence[Stretch]) -> None:
        """Nobody asked."""

"""Spans of time for traces of turns. The rings only record them.

A turn's `trace_parent` (W3C Trace Context) goes with it from the gateway to the leaders; empty: the turn is not traced.
A ring records its spans once, when the turn has left the ring: no step carries anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpan:
    """Span of time that is over. Times are those of `time.monotonic`; `parts` lie within it."""

    name: str
    began: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    parts: tuple[TimeSpan, ...] = ()


def just_ended(name: str, seconds: float, attributes: Attributes) -> TimeSpan:
    """Return a span of so many seconds that ends now."""
    now = time.monotonic()
    return TimeSpan(name=name, began=now - seconds, ended=now, attributes=attributes)


class Tracer(Protocol):
    """Recorder of turns' spans."""

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Record spans of the turn whose trace this continues; ignore them where `trace_parent` is empty.

        Never waits.
        """


class NoTracer:
    """Recorder for a service without traces."""

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Ignore the spans."""

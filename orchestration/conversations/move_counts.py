"""How much kept KV has gone from ring to ring, and why."""

from __future__ import annotations

from dataclasses import dataclass

from orchestration.protocol.views import MoveReason, MoveTotals


@dataclass(slots=True)
class _Count:
    num_moved: int = 0
    num_failed: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


class MoveCounts:
    """By the role of the ring that is left, and by reason, since the router started."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, MoveReason], _Count] = {}

    def moved(self, role: str, reason: MoveReason, payload_bytes: int, seconds: float) -> None:
        count = self._of(role, reason)
        count.num_moved += 1
        count.payload_bytes += payload_bytes
        count.seconds += seconds

    def failed(self, role: str, reason: MoveReason) -> None:
        self._of(role, reason).num_failed += 1

    def totals(self) -> tuple[MoveTotals, ...]:
        """Of what has happened at least once."""
        return tuple(
            MoveTotals(
                role=role,
                reason=reason,
                num_moved=count.num_moved,
                num_failed=count.num_failed,
                payload_bytes=count.payload_bytes,
                seconds=count.seconds,
            )
            for (role, reason), count in sorted(self._counts.items())
        )

    def _of(self, role: str, reason: MoveReason) -> _Count:
        return self._counts.setdefault((role, reason), _Count())

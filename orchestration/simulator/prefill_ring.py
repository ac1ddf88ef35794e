"""A simulated prefill ring: one turn at a time, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestration.groups import Group
from orchestration.simulator.clock import Clock
from orchestration.simulator.kept_kv import KeptKv


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """It takes `seconds`; `predicted_seconds` are its plan's. `done` is told when its last chunk is computed."""

    seconds: float
    predicted_seconds: float
    done: Callable[[], None]


class SimulatedPrefillRing:
    """`group` is its entry in the router's registry."""

    def __init__(self, group: Group, clock: Clock) -> None:
        self.group = group
        self.kv = KeptKv(group.registration.capacity_tokens)
        self.busy_seconds = 0.0
        self._clock = clock
        self._queue: deque[PrefillingTurn] = deque()
        self._predicted = 0.0
        self._is_computing = False

    @property
    def predicted_wait(self) -> float:
        """Seconds that the plans of those before a new turn predict, what the first has done already included."""
        return self._predicted

    def enter(self, turn: PrefillingTurn) -> None:
        self._queue.append(turn)
        self._predicted += turn.predicted_seconds
        if not self._is_computing:
            self._start()

    def _start(self) -> None:
        self._is_computing = bool(self._queue)
        if self._queue:
            turn = self._queue.popleft()
            self.busy_seconds += turn.seconds
            self._clock.after(turn.seconds, lambda: self._end(turn))

    def _end(self, turn: PrefillingTurn) -> None:
        self._predicted -= turn.predicted_seconds
        turn.done()
        self._start()

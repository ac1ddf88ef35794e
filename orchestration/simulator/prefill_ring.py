"""A simulated prefill ring: one turn at a time, first come first served, by the chunks of its plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestration.groups import Group
from orchestration.simulator.clock import Clock
from orchestration.simulator.kept_kv import KeptKv
from orchestration.turn import Chunk, GroupRegistration

ChunkSeconds = Callable[[GroupRegistration, Chunk], float]


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """`predicted_seconds` are the plan's; `done` is told when the last chunk is computed."""

    chunks: tuple[Chunk, ...]
    predicted_seconds: float
    done: Callable[[], None]


class SimulatedPrefillRing:
    """`group` is its entry in the router's registry; `chunk_seconds` says how long a chunk takes on this ring."""

    def __init__(self, group: Group, clock: Clock, chunk_seconds: ChunkSeconds) -> None:
        self.group = group
        self.kv = KeptKv(group.registration.capacity_tokens)
        self.busy_seconds = 0.0
        self._clock = clock
        self._chunk_seconds = chunk_seconds
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
            seconds = sum(self._chunk_seconds(self.group.registration, chunk) for chunk in turn.chunks)
            self.busy_seconds += seconds
            self._clock.after(seconds, lambda: self._end(turn))

    def _end(self, turn: PrefillingTurn) -> None:
        self._predicted -= turn.predicted_seconds
        turn.done()
        self._start()

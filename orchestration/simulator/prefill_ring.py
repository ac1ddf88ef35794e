"""A simulated prefill ring: the steps of a real prefill scheduler, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from cp_core.layout import TokenRange
from orchestration.groups import Group
from orchestration.prefill_scheduler import PrefillScheduler, ScheduledStep
from orchestration.simulator.clock import ANNOUNCE_SECONDS, Clock
from orchestration.simulator.kept_kv import KeptKv
from orchestration.turn import Chunk


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """`chunks` are those of its plan. `done` is told when its last token is computed."""

    turn_id: str
    chunks: tuple[Chunk, ...]
    done: Callable[[], None]


class SimulatedPrefillRing:
    """`group` is its entry in the router's registry; `step_seconds` says how long a step takes."""

    def __init__(
        self,
        group: Group,
        clock: Clock,
        scheduler: PrefillScheduler,
        step_seconds: Callable[[ScheduledStep], float],
    ) -> None:
        self.group = group
        self.kv = KeptKv(group.registration.capacity_tokens)
        self.busy_seconds = 0.0
        self._clock = clock
        self._scheduler = scheduler
        self._step_seconds = step_seconds
        self._turns: dict[str, PrefillingTurn] = {}
        self._is_computing = False
        self._announces_at = 0.0

    @property
    def predicted_wait(self) -> float:
        """Seconds of all that waits or is being computed, at the rate of the steps of late."""
        return self._scheduler.load / self._scheduler.rate

    def reserve(self, turn_id: str, tokens: TokenRange) -> None:
        """A place in the queue for these new tokens. Raises CapacityExceeded, with when to retry."""
        self._scheduler.reserve(turn_id, tokens=tokens, priority=0, now=self._clock.now)

    def enter(self, turn: PrefillingTurn) -> None:
        """A reserved turn may compute."""
        self._turns[turn.turn_id] = turn
        self._scheduler.ready(turn.turn_id, turn.chunks)
        if not self._is_computing:
            self._next()

    def _announce(self) -> None:
        """Tell the router what a real ring tells it every few seconds; of what no step changes it needs no word."""
        scheduler = self._scheduler
        free = self.kv.capacity - self.kv.num_pinned_tokens
        told = replace(self.group.registration, waiting_work=scheduler.load, work_rate=scheduler.rate, free_tokens=free)
        self.group.announce(told, self._clock.now)

    def _next(self) -> None:
        step = self._scheduler.next_step()
        self._is_computing = step is not None
        if step is not None:
            seconds = self._step_seconds(step)
            self.busy_seconds += seconds
            self._clock.after(seconds, lambda: self._commit(step, seconds))

    def _commit(self, step: ScheduledStep, seconds: float) -> None:
        self._scheduler.commit(step, seconds)
        if self._clock.now >= self._announces_at:
            self._announces_at = self._clock.now + ANNOUNCE_SECONDS
            self._announce()
        for piece in step.pieces:
            if piece.tokens.stop == self._turns[piece.turn_id].chunks[-1].tokens.stop:
                self._turns.pop(piece.turn_id).done()
        self._next()

"""A simulated prefill ring: the steps of a real prefill scheduler, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cp_core.layout.shards import TokenRange
from orchestration.placement.registry import RegisteredRing
from orchestration.prefill.scheduler import Piece, PrefillScheduler, ScheduledStep
from orchestration.protocol.turns import Chunk, PrefillReport
from services.offline.simulator.clock import ANNOUNCE_SECONDS, Clock
from services.offline.simulator.kept_kv import KeptKv


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """`chunks` are those of its plan. `done` is told when its last token is computed: what the turn really took, and
    when its first step began.
    """

    turn_id: str
    chunks: tuple[Chunk, ...]
    done: Callable[[PrefillReport, float], None]
    started: float | None = None
    seconds: float = 0.0
    computed: list[Chunk] = field(default_factory=list)


class SimulatedPrefillRing:
    """`entry` is its entry in the router's registry; `step_seconds` says how long a step takes."""

    def __init__(
        self,
        entry: RegisteredRing,
        clock: Clock,
        scheduler: PrefillScheduler,
        step_seconds: Callable[[ScheduledStep], float],
    ) -> None:
        self.entry = entry
        self.kv = KeptKv(entry.registration.capacity_tokens)
        self.busy_seconds = 0.0
        self.computed_tokens = 0
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
        self.entry.tell(scheduler.load, scheduler.rate, free, self._clock.now)

    def _next(self) -> None:
        step = self._scheduler.next_step()
        self._is_computing = step is not None
        if step is not None:
            seconds = self._step_seconds(step)
            self.busy_seconds += seconds
            for piece in step.pieces:
                turn = self._turns[piece.turn_id]
                turn.started = self._clock.now if turn.started is None else turn.started
            self._clock.after(seconds, lambda: self._commit(step, seconds))

    def _commit(self, step: ScheduledStep, seconds: float) -> None:
        self._scheduler.commit(step, seconds)
        if self._clock.now >= self._announces_at:
            self._announces_at = self._clock.now + ANNOUNCE_SECONDS
            self._announce()
        for piece in step.pieces:
            self._enter(piece, step, seconds)
        self._next()

    def _enter(self, piece: Piece, step: ScheduledStep, seconds: float) -> None:
        """In the turn's own record, which ends with its last piece."""
        turn = self._turns[piece.turn_id]
        self.computed_tokens += len(piece.tokens)
        turn.seconds += seconds
        turn.computed.append(Chunk(tokens=piece.tokens, algorithm=step.algorithm, num_turns=len(step.pieces)))
        if piece.tokens.stop == turn.chunks[-1].tokens.stop:
            del self._turns[piece.turn_id]
            assert turn.started is not None, "it was computed"
            turn.done(PrefillReport(prefill_seconds=turn.seconds, chunks=tuple(turn.computed)), turn.started)

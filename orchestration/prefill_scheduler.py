"""Decides which tokens of which turns a prefill ring computes in its next step. Pure Python and synchronous; time is
an argument, so that a simulation runs it as the leader does.

reserved ──ready──> waiting ──next_step──> in a step ──commit──> waiting ... ──commit of the last token──> gone
    └──────────────────┴────────── remove ──────┴──────────────────┘

Two orders share every step. *By age*: the turn that came first, a step of priority counting like `ageing_seconds` of
waiting, has `AGE_SHARE` of the budget for itself. *By length*: the rest goes to the highest priority first, and of
equals to what is finished soonest. So a short prompt joins the next step however long the others are, and the oldest
turn moves on at every step however many short ones come: nobody who arrives later than it by more than `ageing_seconds`
times the difference in priority can take that place from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cp_core.errors import CapacityExceeded
from cp_core.layout import TokenRange
from orchestration.prefill_work import StepLimits, WorkModel
from orchestration.turn import Chunk
from workers.steps import Algorithm

AGE_SHARE = 0.25
"""Of every step, to the oldest turn."""
MIN_SHARED_TOKENS = 4
"""A step of fewer tokens is not divided; the two orders then take whole steps by turns."""
RATE_MEMORY = 0.9
"""How much of the measured rate earlier steps make up, from one step to the next."""
MIN_RETRY_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillScheduling:
    """How a prefill ring shares its steps; see `services.config.PrefillConfig` for what each key means to a user."""

    step_budget: float = 0.0
    min_chunk_tokens: int = 1024
    fuse: bool = True
    interleave: bool = True
    ageing_seconds: float = 10.0
    max_queue_work: float = 50e6


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one turn that are computed in a step."""

    turn_id: str
    tokens: TokenRange


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What the ring computes next: all pieces in one pass, by one algorithm. `work` is in work units."""

    number: int
    algorithm: Algorithm
    pieces: tuple[Piece, ...]
    work: float


@dataclass(slots=True, eq=False)
class _Item:
    """One turn. Tokens [position, stop) are to be computed; `advice` is empty until the turn may compute."""

    turn_id: str
    position: int
    stop: int
    priority: int
    arrived: float
    advice: tuple[Chunk, ...] = ()
    is_begun: bool = False

    @property
    def num_left(self) -> int:
        return self.stop - self.position

    @property
    def algorithm(self) -> Algorithm:
        """Of the planned chunk that holds the next token."""
        planned = (chunk.algorithm for chunk in self.advice if self.position < chunk.tokens.stop)
        return next(planned, self.advice[-1].algorithm)


class PrefillScheduler:
    """The queue of one incarnation of a ring. `rate` is in work units a second: a guess, until steps were measured."""

    def __init__(
        self, name: str, work: WorkModel, limits: StepLimits, scheduling: PrefillScheduling, *, rate: float
    ) -> None:
        self.limits = limits
        self._name = name
        self._work = work
        self._scheduling = scheduling
        self._items: dict[str, _Item] = {}
        self._rate = rate
        self._measured_work = 0.0
        self._measured_seconds = 0.0
        self._num_steps = 0
        self._work_by_age = 0.0
        self._work_by_length = 0.0

    # --- who waits ---------------------------------------------------------------------------------------------------

    def reserve(self, turn_id: str, *, tokens: TokenRange, priority: int, now: float) -> None:
        """Enter a turn of which `tokens` are to be computed at most; it waits until `ready`.

        Raises CapacityExceeded, with when to retry, where the queue would hold more work than it may. A turn that finds
        the queue empty is taken however long it is: it would never find more room.
        """
        asked, load = self._work.work(len(tokens), tokens.start), self.load
        limit = self._scheduling.max_queue_work
        if load and load + asked > limit:
            seconds = self.seconds_for(load + min(asked, limit) - limit)
            raise CapacityExceeded(
                f"prefill ring {self._name}: {load:.0f} work units are waiting, the prompt adds {asked:.0f} and at "
                f"most {limit:.0f} are allowed; retry in {seconds:.1f} s",
                retry_after_seconds=seconds,
            )
        self._items[turn_id] = _Item(turn_id, tokens.start, tokens.stop, priority, now)

    def ready(self, turn_id: str, chunks: Sequence[Chunk]) -> None:
        """The turn may compute: the tokens of `chunks`, whose algorithms are advice; how it is cut is decided here."""
        item = self._items[turn_id]
        item.position, item.stop = chunks[0].tokens.start, chunks[-1].tokens.stop
        item.advice = tuple(chunks)

    def remove(self, turn_id: str) -> None:
        """The turn will not compute any more. Idempotent."""
        self._items.pop(turn_id, None)

    @property
    def load(self) -> float:
        """Work units of all turns that are reserved, waiting or computing."""
        return sum(self._work.work(item.num_left, item.position) for item in self._items.values())

    @property
    def num_waiting(self) -> int:
        """Turns that may compute and have not finished."""
        return sum(1 for item in self._items.values() if item.advice)

    @property
    def rate(self) -> float:
        """Work units a second, of late."""
        return self._measured_work / self._measured_seconds if self._measured_seconds else self._rate

    def seconds_for(self, work: float) -> float:
        """When this much of the queue will have been computed."""
        return max(MIN_RETRY_SECONDS, work / self.rate)

    # --- schedule, (run,) commit -------------------------------------------------------------------------------------

    def next_step(self) -> ScheduledStep | None:
        """What to compute now; None where nobody is ready. A step that is given out is run, then committed."""
        ready = [item for item in self._items.values() if item.advice]
        if not ready:
            return None
        scheduling = self._scheduling
        is_divided = scheduling.fuse and scheduling.interleave and self.limits.tokens >= MIN_SHARED_TOKENS
        chosen = self._divided(ready) if is_divided else self._led(ready)
        work = {item: self._work.work(length, item.position) for item, length in chosen.items()}
        self._num_steps += 1
        return ScheduledStep(
            number=self._num_steps,
            algorithm=_algorithm_of_most(work),
            pieces=tuple(
                Piece(item.turn_id, TokenRange(item.position, item.position + length))
                for item, length in chosen.items()
            ),
            work=sum(work.values()),
        )

    def commit(self, step: ScheduledStep, seconds: float) -> None:
        """The step was computed and took so long. Turns removed meanwhile are passed over."""
        self._measured_work = RATE_MEMORY * self._measured_work + step.work
        self._measured_seconds = RATE_MEMORY * self._measured_seconds + seconds
        for piece in step.pieces:
            item = self._items.get(piece.turn_id)
            if item is None:
                continue
            item.position, item.is_begun = piece.tokens.stop, True
            if not item.num_left:
                self.remove(piece.turn_id)

    def without(self, step: ScheduledStep, turn_ids: Iterable[str]) -> ScheduledStep:
        """The step with some turns left out that could not take part after all."""
        gone = set(turn_ids)
        pieces = tuple(piece for piece in step.pieces if piece.turn_id not in gone)
        work = sum(self._work.work(len(piece.tokens), piece.tokens.start) for piece in pieces)
        return replace(step, pieces=pieces, work=work)

    # --- the two orders ----------------------------------------------------------------------------------------------

    def _by_age(self, item: _Item) -> tuple[float, str]:
        return item.arrived - item.priority * self._scheduling.ageing_seconds, item.turn_id

    def _by_length(self, item: _Item) -> tuple[int, float, float, str]:
        return -item.priority, self._work.work(item.num_left, item.position), item.arrived, item.turn_id

    def _divided(self, ready: Sequence[_Item]) -> dict[_Item, int]:
        """Tokens of each turn in a step that both orders share."""
        limits = self.limits
        oldest, order = min(ready, key=self._by_age), sorted(ready, key=self._by_length)
        share = AGE_SHARE * limits.budget
        own = self._at_least(oldest, share, max(1, int(AGE_SHARE * limits.tokens)))
        charged = min(share, self._work.work(own, oldest.position))
        chosen: dict[_Item, int] = {}
        spent, taken = 0.0, 0
        for item in order:
            room, tokens = limits.budget - charged - spent, limits.tokens - own - taken
            if item is oldest:
                # What nobody shorter wanted is its own too.
                longer = self._at_most(oldest, limits.budget - spent, limits.tokens - taken)
                if longer > own:
                    own = longer
                    charged = self._work.work(own, oldest.position)
                continue
            fit = self._at_least if item is order[0] else self._whole_or_long
            length = fit(item, room, tokens)
            if length:
                chosen[item] = length
                spent += self._work.work(length, item.position)
                taken += length
        return {oldest: own} | chosen

    def _led(self, ready: Sequence[_Item]) -> dict[_Item, int]:
        """Tokens of each turn in a step that one turn leads; where turns are fused, whole prompts fill it up."""
        limits = self.limits
        begun = None if self._scheduling.interleave else next((item for item in ready if item.is_begun), None)
        leader = begun or self._by_turns(ready)
        chosen = {leader: self._at_least(leader, limits.budget, limits.tokens)}
        if not self._scheduling.fuse:
            return chosen
        spent, taken = self._work.work(chosen[leader], leader.position), chosen[leader]
        for item in sorted(ready, key=self._by_length):
            fits = self._at_most(item, limits.budget - spent, limits.tokens - taken)
            if item is not leader and fits == item.num_left:
                chosen[item] = fits
                spent += self._work.work(fits, item.position)
                taken += fits
        return chosen

    def _by_turns(self, ready: Sequence[_Item]) -> _Item:
        """The first by age or the first by length, so that each order gets its share of the work over time."""
        oldest, shortest = min(ready, key=self._by_age), min(ready, key=self._by_length)
        if oldest is shortest:
            return oldest
        is_due = self._work_by_age * (1 - AGE_SHARE) < self._work_by_length * AGE_SHARE
        leader = oldest if is_due else shortest
        work = self._work.work(self._at_least(leader, self.limits.budget, self.limits.tokens), leader.position)
        if is_due:
            self._work_by_age += work
        else:
            self._work_by_length += work
        return leader

    def _at_most(self, item: _Item, budget: float, tokens: int) -> int:
        return max(0, min(item.num_left, tokens, self._work.longest(budget, item.position)))

    def _at_least(self, item: _Item, budget: float, tokens: int) -> int:
        """What fits, but the least chunk in any case."""
        return max(self._at_most(item, budget, tokens), min(item.num_left, self.limits.min_chunk))

    def _whole_or_long(self, item: _Item, budget: float, tokens: int) -> int:
        """What fits, if it ends the prompt or is worth a chunk."""
        fits = self._at_most(item, budget, tokens)
        return fits if fits == item.num_left or fits >= self.limits.min_chunk else 0


def _algorithm_of_most(work: dict[_Item, float]) -> Algorithm:
    """One step has one algorithm: that which was planned for most of its work; of equals pass-KV."""
    totals = dict.fromkeys(Algorithm, 0.0)
    for item, units in work.items():
        totals[item.algorithm] += units
    return max(totals, key=lambda name: totals[name])

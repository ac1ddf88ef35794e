"""Simulated time: what is due is done in order, and nothing takes time but what says so."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from cp_core.layout.shards import TokenRange
from orchestration.placement.registry import RegisteredRing
from orchestration.prefill.scheduler import Piece, PrefillScheduler, ScheduledStep
from orchestration.protocol.turns import PlannedChunk, PrefillReport

ANNOUNCE_SECONDS = 2.0
"""How often simulated rings tell the router how they are, as real ones do."""


class Clock:
    """Events of one simulation. Of those due at the same instant the one that was entered first is first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Do `event` when so many seconds, 0 or more, have passed."""
        assert seconds >= 0.0, f"time cannot go back by {seconds} s"
        heapq.heappush(self._due, (self.now + seconds, next(self._order), event))

    def run(self) -> None:
        """Until nothing is due any more."""
        while self._due:
            self.now, _, event = heapq.heappop(self._due)
            event()


class KeptKv:
    """`capacity` tokens of a ring. A conversation is pinned while a turn of it runs, and kept afterwards."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._pinned: dict[int, int] = {}
        self._used = 0
        self.num_pinned_tokens = 0

    def held(self, conversation: int) -> int:
        """Tokens of it that are here."""
        return self._kept.get(conversation, 0)

    def try_pin(self, conversation: int, tokens: int) -> bool:
        """Room for `tokens` of the conversation, kept ones of others evicted if need be. False, and nothing changed,
        where running turns leave less.
        """
        if self.num_pinned_tokens + tokens > self.capacity:
            return False
        self._used += tokens - self._kept.pop(conversation, 0)
        self._pinned[conversation] = tokens
        self.num_pinned_tokens += tokens
        while self._used > self.capacity:
            _, evicted = self._kept.popitem(last=False)
            self._used -= evicted
        return True

    def settle(self, conversation: int, keep: int) -> None:
        """The turn has ended: its first `keep` tokens stay while there is room."""
        pinned = self._pinned.pop(conversation)
        self.num_pinned_tokens -= pinned
        self._used += keep - pinned
        if keep:
            self._kept[conversation] = keep

    def drop(self, conversation: int) -> None:
        """What is kept of it is freed. Idempotent."""
        self._used -= self._kept.pop(conversation, 0)

    def check_integrity(self) -> None:
        """Nothing is counted twice or lost, and nothing is beyond the capacity."""
        assert self.num_pinned_tokens == sum(self._pinned.values()), "pinned tokens do not add up"
        assert self._used == sum(self._kept.values()) + self.num_pinned_tokens, "tokens do not add up"
        assert self._used <= self.capacity, "more is held than fits"
        assert not self._kept.keys() & self._pinned.keys(), "a conversation is both kept and pinned"


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """`chunks` are those of its plan. `done` is told when its last token is computed: what the turn really took, and
    when its first step began.
    """

    turn_id: str
    chunks: tuple[PlannedChunk, ...]
    done: Callable[[PrefillReport, float], None]
    started: float | None = None
    seconds: float = 0.0
    computed: list[PlannedChunk] = field(default_factory=list)


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
        turn.computed.append(PlannedChunk(tokens=piece.tokens, algorithm=step.algorithm, num_turns=len(step.pieces)))
        if piece.tokens.stop == turn.chunks[-1].tokens.stop:
            del self._turns[piece.turn_id]
            assert turn.started is not None, "it was computed"
            turn.done(PrefillReport(prefill_seconds=turn.seconds, chunks=tuple(turn.computed)), turn.started)


StepSeconds = Callable[[int, float], float]


@dataclass(slots=True, eq=False)
class DecodingTurn:
    """`context` tokens while it decodes. `first` is told when its first token is there, `last` when its last is."""

    context: int
    output_tokens: int
    first: Callable[[], None]
    last: Callable[[], None]


class SimulatedDecodeRing:
    """`entry` is its entry in the router's registry; `step_seconds(batch, mean context)` says how long a step takes."""

    def __init__(self, entry: RegisteredRing, clock: Clock, max_batch: int, step_seconds: StepSeconds) -> None:
        self.entry = entry
        self.kv = KeptKv(entry.registration.capacity_tokens)
        self.largest_batch = 0
        self.sequence_seconds = 0.0  # of its batch, over all its time
        self._clock = clock
        self._max_batch = max_batch
        self._step_seconds = step_seconds
        self._waiting: deque[DecodingTurn] = deque()
        self._running: list[tuple[float, int, DecodingTurn]] = []
        self._order = count()
        self._context = 0
        # Steps are counted, not simulated one by one: between changes of the batch all take equally long.
        self._steps = 0.0
        self._step = 0.0
        self._since = 0.0
        self._epoch = 0
        self._announces_at = 0.0

    def admit(self, turn: DecodingTurn) -> None:
        """Its KV is here: it joins the batch, or waits for a place in it."""
        self._waiting.append(turn)
        self._change()

    def _change(self) -> None:
        """Count the steps until now, let waiting turns in, and see when the next one is done."""
        self._count_steps()
        entered = []
        while self._waiting and len(self._running) < self._max_batch:
            turn = self._waiting.popleft()
            heapq.heappush(self._running, (self._steps + turn.output_tokens, next(self._order), turn))
            self._context += turn.context
            entered.append(turn)
        self.largest_batch = max(self.largest_batch, len(self._running))
        if not self._running:
            return
        self._step = self._step_seconds(len(self._running), self._context / len(self._running))
        for turn in entered:
            self._clock.after(self._step, turn.first)
        self._epoch += 1
        due, epoch = self._running[0][0], self._epoch
        self._clock.after(max(0.0, due - self._steps) * self._step, lambda: self._finish(epoch))

    def _count_steps(self) -> None:
        """Those until now, before the batch is another one."""
        if self._running:
            seconds = self._clock.now - self._since
            self._steps += seconds / self._step
            self.sequence_seconds += seconds * len(self._running)
        self._since = self._clock.now

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:
            return  # the batch has changed since: another event stands for this one
        self._count_steps()
        _, _, turn = heapq.heappop(self._running)
        self._context -= turn.context
        turn.last()
        if self._clock.now >= self._announces_at:
            self._announces_at = self._clock.now + ANNOUNCE_SECONDS
            free = self.kv.capacity - self.kv.num_pinned_tokens
            self.entry.tell(0.0, 0.0, free, self._clock.now)
        self._change()

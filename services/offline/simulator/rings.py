"""Simulated clock, and the simulated prefill and decode rings with the KV that they retain.

Made by `cluster.Cluster`; `simulation.Simulation` sends turns to the rings and runs the clock.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from ringserve.cp_core.errors import CapacityExceeded
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.prefill.scheduler import Piece, PrefillScheduler, ScheduledStep
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.turns import PrefillReport
from ringserve.orchestration.ring.kv_pool import KvPool
from ringserve.services.offline.simulator.trace import BLOCK_TOKENS

ANNOUNCE_SECONDS = 2.0
"""Seconds between two reports of a simulated ring to the router, as of real rings."""


class Clock:
    """Queue of the events of one simulation; events due at the same instant run in order of entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Run `event` after that many simulated seconds, 0 or more."""
        assert seconds >= 0.0, f"time cannot go back by {seconds} s"
        heapq.heappush(self._due, (self.now + seconds, next(self._order), event))

    def run(self) -> None:
        """Run all events until none is due."""
        while self._due:
            self.now, _, event = heapq.heappop(self._due)
            event()


class RetainedKv:
    """KV of a ring, counted in tokens.

    A conversation is pinned while its turn runs and retained afterwards; the least recently used is evicted first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._retained: OrderedDict[str, int] = OrderedDict()
        self._pinned: dict[str, int] = {}
        self._used = 0
        self.num_pinned_tokens = 0

    def held(self, conversation: str) -> int:
        """Return the retained tokens of a conversation."""
        return self._retained.get(conversation, 0)

    def try_pin(self, conversation: str, tokens: int, *, shares: str = "", shared_tokens: int = 0) -> bool:
        """Pin `tokens` of the conversation, evicting retained KV of others if necessary; nothing is shared.

        Return False and change nothing if running turns leave less room.
        """
        assert not shares, "this KV is counted in tokens, which no two conversations share"
        if self.num_pinned_tokens + tokens > self.capacity:
            return False
        self._used += tokens - self._retained.pop(conversation, 0)
        self._pinned[conversation] = tokens
        self.num_pinned_tokens += tokens
        while self._used > self.capacity:
            _, evicted = self._retained.popitem(last=False)
            self._used -= evicted
        return True

    def unpin(self, conversation: str, retain: int, *, is_spare: bool = False) -> None:
        """End a turn: its first `retain` tokens stay while there is room."""
        pinned = self._pinned.pop(conversation)
        self.num_pinned_tokens -= pinned
        self._used += retain - pinned
        if retain:
            self._retained[conversation] = retain

    def note_computed(self, conversation: str, tokens: int) -> None:
        """Take no notice: nothing is shared."""

    def drop(self, conversation: str) -> None:
        """Free the retained KV of a conversation. Idempotent."""
        self._used -= self._retained.pop(conversation, 0)

    def check_integrity(self) -> None:
        """Assert that no token is counted twice or lost, and that all fit the capacity."""
        assert self.num_pinned_tokens == sum(self._pinned.values()), "pinned tokens do not add up"
        assert self._used == sum(self._retained.values()) + self.num_pinned_tokens, "tokens do not add up"
        assert self._used <= self.capacity, "more tokens are held than fit"
        assert not self._retained.keys() & self._pinned.keys(), "a conversation is both retained and pinned"


class BlockKv:
    """KV of a ring in blocks of BLOCK_TOKENS, over the pool of a real ring: sequences that begin alike share blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._pool = KvPool(1, capacity // BLOCK_TOKENS, 1, part_tokens=1)

    @property
    def num_pinned_tokens(self) -> int:
        return self.capacity - self._pool.free_tokens * BLOCK_TOKENS

    def held(self, kv_id: str) -> int:
        """Return the retained tokens of a sequence."""
        return self._pool.num_retained(kv_id) * BLOCK_TOKENS

    def try_pin(self, kv_id: str, tokens: int, *, shares: str = "", shared_tokens: int = 0) -> bool:
        """Pin a new sequence of `tokens`, whose first `shared_tokens` use the blocks of sequence `shares`.

        Return False and change nothing if running turns leave less room.
        """
        try:
            sequence = self._pool.pin(kv_id, kv_id, shared_tokens // BLOCK_TOKENS, shares=shares)
            self._pool.make_room(sequence, [_blocks(tokens)])
        except CapacityExceeded:
            self._pool.settle(kv_id, kv_id, 0)
            return False
        return True

    def note_computed(self, kv_id: str, tokens: int) -> None:
        """Let others share the first `tokens` tokens of a pinned sequence."""
        sequence = self._pool.get(kv_id)
        assert sequence is not None, "a turn that runs is pinned"
        sequence.shards = ShardMap.of(((TokenRange(0, _blocks(tokens)),),)) if tokens else ShardMap.empty(1)

    def unpin(self, kv_id: str, retain: int, *, is_spare: bool = False) -> None:
        """End a turn: its first `retain` tokens stay while there is room; KV with `is_spare` goes first."""
        self.note_computed(kv_id, retain)
        self._pool.settle(kv_id, kv_id, _blocks(retain), is_guest=is_spare)

    def drop(self, kv_id: str) -> None:
        """Free the retained KV of a sequence. Idempotent."""
        self._pool.settle(kv_id, "", 0)

    def check_integrity(self) -> None:
        """Assert that no block is counted twice or lost."""
        self._pool.check_integrity()


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


@dataclass(slots=True, eq=False)
class PrefillingTurn:
    """Turn on a prefill ring, with the `chunks` of its plan.

    `done` is called after its last token, with the report of the prefill and the time when its first step began.
    """

    turn_id: str
    chunks: tuple[PlannedChunk, ...]
    done: Callable[[PrefillReport, float], None]
    started: float | None = None
    seconds: float = 0.0
    computed: list[PlannedChunk] = field(default_factory=list)


class SimulatedPrefillRing:
    """Prefill ring that runs the steps of a real prefill scheduler, one after the other.

    `entry` is its entry in the router's registry; `step_seconds` predicts the duration of a step.
    """

    def __init__(
        self,
        entry: RegisteredRing,
        kv: RetainedKv | BlockKv,
        clock: Clock,
        scheduler: PrefillScheduler,
        step_seconds: Callable[[ScheduledStep], float],
    ) -> None:
        self.entry = entry
        self.kv = kv
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
        """Predicted seconds of all queued and running work, at the rate of recent steps."""
        return self._scheduler.load / self._scheduler.rate

    def reserve(self, turn_id: str, tokens: TokenRange) -> None:
        """Reserve room in the queue for these new tokens. Raises CapacityExceeded with the time to retry."""
        self._scheduler.reserve(turn_id, tokens=tokens, priority=0, now=self._clock.now)

    def enter(self, turn: PrefillingTurn) -> None:
        """Queue the chunks of a reserved turn, whose pulled KV has arrived."""
        self._turns[turn.turn_id] = turn
        self._scheduler.ready(turn.turn_id, turn.chunks)
        if not self._is_computing:
            self._start_step()

    def _announce(self) -> None:
        """Report to the router as a real ring does every few seconds."""
        scheduler = self._scheduler
        free = self.kv.capacity - self.kv.num_pinned_tokens
        self.entry.take_figures(scheduler.load, scheduler.rate, free, self._clock.now)

    def _start_step(self) -> None:
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
            self._record(piece, step, seconds)
        self._start_step()

    def _record(self, piece: Piece, step: ScheduledStep, seconds: float) -> None:
        """Record a computed piece in its turn, which ends with the last one."""
        turn = self._turns[piece.turn_id]
        self.computed_tokens += len(piece.tokens)
        turn.seconds += seconds
        turn.computed.append(PlannedChunk(tokens=piece.tokens, algorithm=step.algorithm, num_turns=len(step.pieces)))
        if piece.tokens.stop == turn.chunks[-1].tokens.stop:
            del self._turns[piece.turn_id]
            assert turn.started is not None, "a computed turn has started"
            turn.done(PrefillReport(prefill_seconds=turn.seconds, chunks=tuple(turn.computed)), turn.started)


StepSeconds = Callable[[int, float], float]


@dataclass(slots=True, eq=False)
class DecodingTurn:
    """Turn in a decode batch, of `context` tokens on average; `first` and `last` are called at those tokens."""

    context: int
    output_tokens: int
    first: Callable[[], None]
    last: Callable[[], None]


class SimulatedDecodeRing:
    """Decode ring that samples one token a step for every sequence of its batch; other turns wait for a place.

    `entry` is its entry in the router's registry; `step_seconds(batch, mean context)` predicts a step.
    """

    def __init__(
        self,
        entry: RegisteredRing,
        kv: RetainedKv | BlockKv,
        clock: Clock,
        max_batch: int,
        step_seconds: StepSeconds,
    ) -> None:
        self.entry = entry
        self.kv = kv
        self.largest_batch = 0
        self.sequence_seconds = 0.0  # batch size integrated over time
        self.busy_seconds = 0.0  # time with any turn
        self._clock = clock
        self._max_batch = max_batch
        self._step_seconds = step_seconds
        self._waiting: deque[DecodingTurn] = deque()
        self._running: list[tuple[float, int, DecodingTurn]] = []
        self._order = count()
        self._context = 0
        # Steps are counted, not simulated one by one: between two changes of the batch all take equally long.
        self._num_steps = 0.0
        self._seconds_per_step = 0.0
        self._counted_until = 0.0
        self._epoch = 0
        self._announces_at = 0.0

    def admit(self, turn: DecodingTurn) -> None:
        """Let a turn whose KV has arrived join the batch, or wait for a place in it."""
        self._waiting.append(turn)
        self._update_batch()

    def _update_batch(self) -> None:
        """Count the steps until now, admit waiting turns, and schedule the end of the turn that ends next."""
        self._count_steps()
        entered = []
        while self._waiting and len(self._running) < self._max_batch:
            turn = self._waiting.popleft()
            heapq.heappush(self._running, (self._num_steps + turn.output_tokens, next(self._order), turn))
            self._context += turn.context
            entered.append(turn)
        self.largest_batch = max(self.largest_batch, len(self._running))
        if not self._running:
            return
        self._seconds_per_step = self._step_seconds(len(self._running), self._context / len(self._running))
        for turn in entered:
            self._clock.after(self._seconds_per_step, turn.first)
        self._epoch += 1
        due, epoch = self._running[0][0], self._epoch
        self._clock.after(max(0.0, due - self._num_steps) * self._seconds_per_step, lambda: self._finish(epoch))

    def _count_steps(self) -> None:
        """Count the steps of the present batch until now."""
        if self._running:
            seconds = self._clock.now - self._counted_until
            self._num_steps += seconds / self._seconds_per_step
            self.sequence_seconds += seconds * len(self._running)
            self.busy_seconds += seconds
        self._counted_until = self._clock.now

    def _finish(self, epoch: int) -> None:
        if epoch != self._epoch:
            return  # the batch has changed since: a later event replaces this one
        self._count_steps()
        _, _, turn = heapq.heappop(self._running)
        self._context -= turn.context
        turn.last()
        if self._clock.now >= self._announces_at:
            self._announces_at = self._clock.now + ANNOUNCE_SECONDS
            free = self.kv.capacity - self.kv.num_pinned_tokens
            self.entry.take_figures(0.0, 0.0, free, self._clock.now)
        self._update_batch()

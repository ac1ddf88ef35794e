"""A simulated decode ring: one token a step for every sequence of its batch; others wait for a place."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from orchestration.placement.registry import RegisteredRing
from services.offline.simulator.clock import ANNOUNCE_SECONDS, Clock
from services.offline.simulator.kept_kv import KeptKv

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

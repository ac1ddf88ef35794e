"""Feeds the decode loop that runs on a ring's first rank, and reads its tokens.

Admissions and removals take effect at the loop's next step border; tokens come back by a long poll with a cursor, so a
lost answer is asked for again and no token is seen twice.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cp_core.errors import RingserveError
from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.ports import RankPort
from workers.protocol.decode_commands import ComputePrompt, DecodeCommand, DecodeEvent, GrowSequence, RemoveSequence

POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A turn whose prompt the loop is to compute, and whoever waits for it."""

    turn: DecodeTurn
    told: asyncio.Future[DecodeEvent]


class DecodeFeed:
    """The turns that decode, at most `max_batch`, and those that wait for a place, in order of arrival.

    One object a ring incarnation. `on_event` gets every event of a turn that is still in the batch. Turns join and
    leave at every step; with `continuous` False, which is for comparisons, nobody joins until the batch is empty.
    """

    def __init__(
        self,
        lead: RankPort,
        max_batch: int,
        timeout: float,
        on_event: Callable[[DecodeTurn, DecodeEvent], None],
        *,
        continuous: bool = True,
    ) -> None:
        self._lead = lead
        self._max_batch = max_batch
        self._timeout = timeout
        self._on_event = on_event
        self._continuous = continuous
        self._waiting: list[DecodeTurn] = []
        self._running: dict[str, DecodeTurn] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._submitting = asyncio.Lock()  # fair: commands reach the loop in the order in which they were given
        self._submissions: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def join(self, turn: DecodeTurn) -> None:
        """Admit the turn, or let it wait for a place. Raises Unavailable when the ring cannot be told."""
        if (submission := self.join_soon(turn)) is not None:
            await asyncio.shield(submission)

    def join_soon(self, turn: DecodeTurn) -> asyncio.Task[None] | None:
        """As `join`, without waiting for the ring to know; a failure ends the reading."""
        turn.left_batch.clear()
        insort(self._waiting, turn, key=lambda other: other.arrival)
        return self._fill()

    async def compute(self, turn: DecodeTurn, prompt: ComputePrompt) -> DecodeEvent:
        """Have the loop compute the turn's prompt -> the event of its first token, or of its removal by `leave`.

        The turn does not join by it. Raises what ended the ring.
        """
        turn.left_batch.clear()
        told: asyncio.Future[DecodeEvent] = asyncio.get_running_loop().create_future()
        self._prompts[turn.turn_id] = _Prompt(turn, told)
        self._submit([prompt])
        return await told

    def grow(self, turn: DecodeTurn, blocks: Sequence[Sequence[int]]) -> None:
        """Blocks were appended to the turn's tables. Whoever joins later joins with the whole tables."""
        if turn.turn_id in self._running:
            self._submit([GrowSequence(sequence_id=turn.turn_id, blocks=tuple(map(tuple, blocks)))])

    async def leave(self, turn: DecodeTurn) -> None:
        """Take the turn out; returns when the loop no longer writes to its blocks."""
        if turn in self._waiting:
            self._waiting.remove(turn)
            return
        if turn.turn_id in self._running or turn.turn_id in self._prompts:
            await asyncio.shield(self._submit([RemoveSequence(sequence_id=turn.turn_id)]))
            await turn.left_batch.wait()

    def _fill(self) -> asyncio.Task[None] | None:
        if self._running and not self._continuous:
            return None
        admitted: list[DecodeCommand] = []
        while self._waiting and len(self._running) < self._max_batch:
            turn = self._waiting.pop(0)
            self._running[turn.turn_id] = turn
            admitted.append(turn.admission())
        return self._submit(admitted) if admitted else None

    def _submit(self, commands: Sequence[DecodeCommand]) -> asyncio.Task[None]:
        """Hand commands to the loop, in the order of the calls, and also when the caller is cancelled.

        A removal that overtook its admission would remove nothing, and admissions may be those of other turns.
        """
        submission = asyncio.create_task(self._submit_in_order(commands))
        self._submissions.add(submission)
        submission.add_done_callback(self._submitted)
        return submission

    async def _submit_in_order(self, commands: Sequence[DecodeCommand]) -> None:
        async with self._submitting:
            await self._lead.submit(commands, self._timeout)

    def _submitted(self, submission: asyncio.Task[None]) -> None:
        self._submissions.discard(submission)
        if not submission.cancelled():
            self._failure = self._failure or submission.exception()

    async def read(self) -> None:
        """Read events for as long as the ring lives; raises what ended it.

        Commands that were lost end it too: who is in the loop's batch is then unknown.
        """
        cursor = 0
        while True:
            batch = await self._lead.poll(cursor, POLL_SECONDS, POLL_SECONDS + self._timeout)
            if self._failure is not None:
                raise self._failure
            cursor = batch.stop
            left = False
            for event in batch.events:
                if event.sequence_id in self._prompts:
                    self._computed(self._prompts.pop(event.sequence_id), event)
                    continue
                turn = self._running.get(event.sequence_id)
                if turn is None:
                    continue
                if event.has_left:
                    del self._running[event.sequence_id]
                    turn.left_batch.set()
                    left = True
                self._on_event(turn, event)
            if left:
                self._fill()

    def _computed(self, prompt: _Prompt, event: DecodeEvent) -> None:
        """The loop writes no more of the prompt."""
        prompt.turn.left_batch.set()
        if not prompt.told.done():
            prompt.told.set_result(event)

    def abandon(self, error: RingserveError) -> None:
        """The ring is gone: nothing of it writes any more."""
        for prompt in self._prompts.values():
            prompt.turn.left_batch.set()
            if not prompt.told.done():
                prompt.told.set_exception(error)
        self._prompts.clear()
        for turn in self._running.values():
            turn.left_batch.set()
        self._running.clear()
        self._waiting.clear()

"""Feed of the decode loop that runs on a ring's first rank: commands go in, tokens come out.

The loop applies commands at its next step boundary. Tokens come by a long poll with a cursor: a lost answer is asked
for again, and no token is seen twice.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.decode.turn import DecodeTurn
from ringserve.orchestration.protocol.ports import RankPort
from ringserve.workers.protocol.decode_commands import (
    ComputePrompt,
    DecodeCommand,
    DecodeEvent,
    GrowSequence,
    RemoveSequence,
)

POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A turn whose prompt the loop computes, and the future of the event that answers."""

    turn: DecodeTurn
    answer: asyncio.Future[DecodeEvent]


class DecodeFeed:
    """Turns in the loop's batch, at most `max_batch`, and turns that wait for a place, in order of arrival.

    One object a ring incarnation. `on_event` gets every event of a turn in the batch. Turns join and leave at every
    step. Admissions tell the places of `tail_tokens` tokens.
    """

    def __init__(
        self,
        lead: RankPort,
        max_batch: int,
        timeout: float,
        on_event: Callable[[DecodeTurn, DecodeEvent], None],
        tail_tokens: int = 0,
    ) -> None:
        self._lead = lead
        self._max_batch = max_batch
        self._timeout = timeout
        self._on_event = on_event
        self._tail_tokens = tail_tokens
        self._waiting: list[DecodeTurn] = []
        self._running: dict[str, DecodeTurn] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._submitting = asyncio.Lock()  # fair: commands reach the loop in the order of the calls
        self._submissions: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None

    @property
    def num_running(self) -> int:
        """Turns in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Turns that wait for a place in the batch."""
        return len(self._waiting)

    async def join(self, turn: DecodeTurn) -> None:
        """Admit the turn, or queue it for a place. Raises Unavailable when the ring cannot be reached."""
        if (submission := self.join_soon(turn)) is not None:
            await asyncio.shield(submission)

    def join_soon(self, turn: DecodeTurn) -> asyncio.Task[None] | None:
        """Join without waiting for the ring's acknowledgement; a failure is raised by `read`."""
        turn.left_batch.clear()
        insort(self._waiting, turn, key=lambda other: other.arrival)
        return self._fill()

    async def compute(self, turn: DecodeTurn, prompt: ComputePrompt) -> DecodeEvent:
        """Have the loop compute the turn's prompt; return the event of its first token, or of its removal by `leave`.

        The turn does not join the batch. Raises the error that ended the ring.
        """
        turn.left_batch.clear()
        answer: asyncio.Future[DecodeEvent] = asyncio.get_running_loop().create_future()
        self._prompts[turn.turn_id] = _Prompt(turn, answer)
        self._submit([prompt])
        return await answer

    def grow(self, turn: DecodeTurn, blocks: Sequence[Sequence[int]]) -> None:
        """Append blocks to the loop's tables of the turn. A turn that joins later joins with its whole tables."""
        if turn.turn_id in self._running:
            self._submit([GrowSequence(sequence_id=turn.turn_id, blocks=tuple(map(tuple, blocks)))])

    async def leave(self, turn: DecodeTurn) -> None:
        """Take the turn out; return when the loop no longer writes to its blocks."""
        if turn in self._waiting:
            self._waiting.remove(turn)
            return
        if turn.turn_id in self._running or turn.turn_id in self._prompts:
            await asyncio.shield(self._submit([RemoveSequence(sequence_id=turn.turn_id)]))
            await turn.left_batch.wait()

    def _fill(self) -> asyncio.Task[None] | None:
        """Admit turns that wait to free places of the batch."""
        admitted: list[DecodeCommand] = []
        while self._waiting and len(self._running) < self._max_batch:
            turn = self._waiting.pop(0)
            self._running[turn.turn_id] = turn
            admitted.append(turn.admission(self._tail_tokens))
        return self._submit(admitted) if admitted else None

    def _submit(self, commands: Sequence[DecodeCommand]) -> asyncio.Task[None]:
        """Hand commands to the loop in the order of the calls, also when the caller is cancelled.

        A removal that overtook its admission would remove nothing, and admissions may belong to other turns.
        """
        submission = asyncio.create_task(self._submit_in_order(commands))
        self._submissions.add(submission)
        submission.add_done_callback(self._on_submitted)
        return submission

    async def _submit_in_order(self, commands: Sequence[DecodeCommand]) -> None:
        async with self._submitting:
            await self._lead.submit(commands, self._timeout)

    def _on_submitted(self, submission: asyncio.Task[None]) -> None:
        self._submissions.discard(submission)
        if not submission.cancelled():
            self._failure = self._failure or submission.exception()

    async def read(self) -> None:
        """Read events for as long as the ring lives; raise the error that ended it.

        Lost commands end it too: the members of the loop's batch are then unknown.
        """
        cursor = 0
        while True:
            batch = await self._lead.poll(cursor, POLL_SECONDS, POLL_SECONDS + self._timeout)
            if self._failure is not None:
                raise self._failure
            cursor = batch.stop
            has_place = False
            for event in batch.events:
                if event.sequence_id in self._prompts:
                    self._on_computed(self._prompts.pop(event.sequence_id), event)
                    continue
                turn = self._running.get(event.sequence_id)
                if turn is None:
                    continue
                if event.has_left:
                    del self._running[event.sequence_id]
                    turn.left_batch.set()
                    has_place = True
                self._on_event(turn, event)
            if has_place:
                self._fill()

    def _on_computed(self, prompt: _Prompt, event: DecodeEvent) -> None:
        """Answer the caller of `compute`; the loop writes no more KV of the prompt."""
        prompt.turn.left_batch.set()
        if not prompt.answer.done():
            prompt.answer.set_result(event)

    def abandon(self, error: RingserveError) -> None:
        """Empty the batch of a lost ring, whose ranks no longer write."""
        for prompt in self._prompts.values():
            prompt.turn.left_batch.set()
            if not prompt.answer.done():
                prompt.answer.set_exception(error)
        self._prompts.clear()
        for turn in self._running.values():
            turn.left_batch.set()
        self._running.clear()
        self._waiting.clear()

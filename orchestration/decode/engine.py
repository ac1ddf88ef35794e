"""Execution on a decode ring: a *feed* of commands to its decode loop, a *room* with its blocks, prompts it computes.

The decode leader runs it. The *feed* belongs to the decode loop on the ring's first rank. The loop applies commands at
its next step boundary. Tokens come by a long poll with a cursor: a lost answer is asked for again, and no token is seen
twice.

The *room* decides about KV blocks, and the engine carries it out. A turn's tables begin with room for its prompt and a
headroom, and get another headroom when half of it is used. If no block is free, the pool first evicts retained
conversations. If that is not enough, turns become STARVED or PREEMPTED, and come back by RESUMING (`DecodeTurnState`).

No turn waits for ever. A turn is preempted only for an older one. So the oldest turn in the batch is never preempted,
and ends after at most max_tokens steps. New turns are refused while a turn is held up, and preempted turns come back in
order of arrival. So the number of turns falls until the oldest of all has the blocks that it needs. Alone it fits,
because the router refuses turns that do not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringserve.cp_core.errors import (
    CapacityExceeded,
    InvalidRequest,
    NotFinite,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.cp_core.layout.shards import TokenRange, level_counts
from ringserve.orchestration.decode.turn import DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.ports import RankPort, RouterPort
from ringserve.orchestration.protocol.turns import Admit, PrefillReport, ResumeTurn
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.orchestration.ring.kv_transfers import drop
from ringserve.orchestration.ring.life import Ring
from ringserve.workers.protocol.steps import (
    Algorithm,
    ComputePrompt,
    DecodeCommand,
    DecodeEvent,
    FinishReason,
    GrowSequence,
    RemoveSequence,
)
from ringserve.workers.sampling.parameters import TokenHistory

URGENT_TOKENS = 4
"""A turn with at most this many free slots takes a younger turn's blocks. With more, turns may end in time."""

OWNER_DRIFT = 2
"""Tokens beyond a level share of an answer that a rank may store, so that a step's new KV can go to all ranks."""
POLL_SECONDS = 2.0
"""Longest time that one poll waits for events."""
log = logging.getLogger(__name__)
RESUME_PAUSE_SECONDS = 0.5
"""Seconds between attempts to resume a turn that no prefill ring can take now; the turn's deadline bounds them."""
Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts work in the background, which lives at most as long as the leader."""


class RoomActions(Protocol):
    """Effects of the room's decisions. None of them waits."""

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        """Tell the ranks of blocks that were appended to the tables."""

    def rejoin(self, turn: DecodeTurn) -> None:
        """Put a starved turn, which has new blocks, back into the batch."""

    def preempt(self, turn: DecodeTurn) -> None:
        """Take the turn out of the batch, then call `DecodeRoom.preempted`."""

    def resume(self, turn: DecodeTurn) -> None:
        """Have the KV of a turn made again in its new, empty blocks.

        Then call `DecodeRoom.enter` if the KV is whole, `release` if that fails.
        """


class DecodeRoom:
    """Blocks of one ring incarnation and the turns that want them. `headroom` is in tokens of the whole ring."""

    def __init__(self, pool: KvPool, headroom: int, actions: RoomActions) -> None:
        self.num_preemptions = 0
        self._pool = pool
        self._headroom = max(headroom, 1)
        self._actions = actions
        self._active: list[DecodeTurn] = []  # in the batch, waiting for a place in it, or starved; by arrival
        self._preempted: list[DecodeTurn] = []  # by arrival
        self._resuming: set[str] = set()  # ids of turns from RESUMING until `enter`, `release` or `end`
        self._leaving: set[str] = set()  # ids of turns whose blocks are about to be free

    @property
    def num_held_up(self) -> int:
        """Turns that have begun and wait for blocks or for their KV to be made again."""
        starved = sum(turn.state is DecodeTurnState.STARVED for turn in self._active)
        return len(self._preempted) + len(self._resuming) + starved

    def reserve(self, sequence: SequenceKv, filled: tuple[int, ...], max_tokens: int) -> int:
        """Reserve blocks for a new turn whose prompt fills `filled[r]` slots of rank r; return its room in tokens.

        Raises CapacityExceeded, having changed nothing.
        """
        if self.num_held_up:
            raise CapacityExceeded(
                f"kv cache: {self.num_held_up} running turns wait for free blocks; retry when others have ended"
            )
        answer = min(self._headroom, max_tokens)
        room = sum(filled) + answer
        self._pool.make_room(sequence, self._slots_for(filled, answer))
        return room

    def enter(self, turn: DecodeTurn) -> None:
        """Add a turn whose KV is whole; it may be preempted from now on. It joins the batch after this."""
        self._resuming.discard(turn.turn_id)
        insort(self._active, turn, key=lambda other: other.arrival)
        self.balance()

    def note_token(self, turn: DecodeTurn) -> None:
        """Give the turn, which has one token more, new blocks if it needs them."""
        if self._wants(turn):
            self.balance()

    def starve(self, turn: DecodeTurn) -> None:
        """Record that the turn left the batch because its tables are full."""
        turn.to(DecodeTurnState.STARVED)
        self.balance()

    def preempted(self, turn: DecodeTurn) -> None:
        """Take back the blocks of a turn that has left the batch by `RoomActions.preempt`. No rank uses them now."""
        if turn in self._active:  # it may have ended instead
            self._leaving.discard(turn.turn_id)
            self._active.remove(turn)
            self.num_preemptions += 1
            turn.to(DecodeTurnState.PREEMPTED)
            self.release(turn)

    def release(self, turn: DecodeTurn) -> None:
        """Free the blocks of a preempted turn, which waits for new ones at its place in the order of arrival."""
        self._resuming.discard(turn.turn_id)
        self._pool.pin(turn.request.kv_id, turn.turn_id, 0)
        turn.owners.clear()
        turn.room = 0
        insort(self._preempted, turn, key=lambda other: other.arrival)
        self.balance()

    def end(self, turn: DecodeTurn) -> None:
        """Give a turn that is ending no more blocks. `freed` follows when its blocks are free."""
        for turns in (self._active, self._preempted):
            if turn in turns:
                turns.remove(turn)
        self._resuming.discard(turn.turn_id)
        self._leaving.add(turn.turn_id)

    def freed(self, turn: DecodeTurn) -> None:
        """Hand out the blocks of an ended turn, which are free now."""
        self._leaving.discard(turn.turn_id)
        self.balance()

    def balance(self) -> None:
        """Hand out free blocks: the oldest turn first, turns that decode before turns that were preempted."""
        for turn in list(self._active):
            if turn.turn_id in self._leaving:
                continue
            if self._wants(turn) and not self._extend(turn) and _free_slots(turn) <= URGENT_TOKENS:
                self._preempt_for(turn)
                return
            if turn.state is DecodeTurnState.STARVED and _free_slots(turn) > 0:
                turn.to(DecodeTurnState.ADMITTED)
                self._actions.rejoin(turn)
        while self._preempted and self._reserve_again(self._preempted[0]):
            turn = self._preempted.pop(0)
            turn.to(DecodeTurnState.RESUMING)
            self._resuming.add(turn.turn_id)
            self._actions.resume(turn)

    def _wants(self, turn: DecodeTurn) -> bool:
        return turn.room < turn.final_tokens and _free_slots(turn) <= self._headroom // 2

    def _extend(self, turn: DecodeTurn) -> bool:
        """Extend the turn's tables to a headroom beyond its KV, or to one block on each rank if the pool lacks more."""
        for step in (self._headroom, self._pool.block_tokens * self._pool.num_ranks):
            room = min(turn.kv_tokens + step, turn.final_tokens)
            if room <= turn.room:
                continue
            before = [len(table) for table in turn.sequence.blocks]
            try:
                self._pool.make_room(turn.sequence, self._slots_for(turn.held, room - turn.kv_tokens))
            except CapacityExceeded:
                continue
            turn.room = room
            blocks = [table[known:] for table, known in zip(turn.sequence.blocks, before, strict=True)]
            if any(blocks):
                self._actions.grow(turn, blocks)
            return True
        return False

    def _preempt_for(self, turn: DecodeTurn) -> None:
        """Preempt the youngest turn that is younger than `turn`, unless one is leaving already."""
        if not self._leaving and self._active[-1] is not turn:
            self._leaving.add(self._active[-1].turn_id)
            self._actions.preempt(self._active[-1])

    def _reserve_again(self, turn: DecodeTurn) -> bool:
        room = min(turn.kv_tokens + self._headroom, turn.final_tokens)
        try:
            self._pool.make_room(turn.sequence, self._slots_for(turn.held, room))
        except CapacityExceeded:
            return False
        turn.room = room
        return True

    def _slots_for(self, held: Sequence[int], num_tokens: int) -> list[int]:
        """Return the slots that each rank needs for its `held` tokens and for its share of `num_tokens` more.

        A rank's share is a level one plus at most `OWNER_DRIFT` tokens, within the rank's capacity.
        """
        most = self._pool.capacity_tokens // self._pool.num_ranks
        return [
            max(own + more, min(own + more + OWNER_DRIFT, own + num_tokens, most))
            for own, more in zip(held, level_counts(held, num_tokens), strict=True)
        ]


def _free_slots(turn: DecodeTurn) -> int:
    """Return the slots that the turn's tables have beyond its KV."""
    return turn.room - turn.kv_tokens


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Turn whose prompt the loop computes, and the future that gets the event of its first token or its removal."""

    turn: DecodeTurn
    answer: asyncio.Future[DecodeEvent]


class DecodeFeed:
    """Turns in the loop's batch, at most `max_batch`, and turns that wait for a place, in order of arrival.

    There is one feed per ring incarnation. `on_event` gets every event of a turn in the batch. Turns join and leave at
    every step. The command that admits a turn says where its newest `tail_tokens` tokens are stored.
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
        """Admit waiting turns to the batch while it has free places."""
        admitted: list[DecodeCommand] = []
        while self._waiting and len(self._running) < self._max_batch:
            turn = self._waiting.pop(0)
            self._running[turn.turn_id] = turn
            admitted.append(turn.admission(self._tail_tokens))
        return self._submit(admitted) if admitted else None

    def _submit(self, commands: Sequence[DecodeCommand]) -> asyncio.Task[None]:
        """Hand commands to the loop in the order of the calls, even if the caller is cancelled.

        A removal that overtook an admission would remove nothing, and the commands may admit other turns than the
        caller's.
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

        A command that could not be submitted ends the ring too, because it is then unknown which turns the batch has.
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


class DecodeEngine:
    """Feed and room of a ring. `start` makes both for a new incarnation, `stop` drops them when the ring is lost.

    Tokens go to the turns' streams. `on_last_token(turn, reason)` is called if a turn's answer is complete;
    `on_lost(turn, error)` if a turn cannot go on: the router no longer knows it, or it has no next token (its logits
    are not finite, or nothing is allowed).
    """

    def __init__(
        self,
        ring: Ring,
        router: RouterPort,
        spawn: Spawn,
        on_last_token: Callable[[DecodeTurn, FinishReason], None],
        on_lost: Callable[[DecodeTurn, RingserveError], None],
    ) -> None:
        self._ring = ring
        self._router = router
        self._spawn = spawn
        self._on_last_token = on_last_token
        self._on_lost = on_lost
        self._feed: DecodeFeed | None = None
        self._room: DecodeRoom | None = None
        self._earlier_preemptions = 0  # of former incarnations

    @property
    def num_running(self) -> int:
        """Turns in the batch."""
        return self._feed.num_running if self._feed else 0

    @property
    def num_preemptions(self) -> int:
        """Preemptions in all incarnations."""
        return self._earlier_preemptions + (self._room.num_preemptions if self._room else 0)

    def start(self) -> None:
        """Make an empty feed and room for a new incarnation of the ring."""
        ring, settings = self._ring, self._ring.settings
        feed = self._feed = DecodeFeed(
            ring.ranks[0],
            settings.ranks.max_batch,
            settings.control_timeout,
            self._on_event,
            ring.model.tail_tokens,
        )
        self._room = _RoomActions(ring, feed, self._router, self._spawn, self._on_lost).room
        self._spawn(self._read(feed, ring.incarnation))

    def stop(self, error: RingserveError) -> None:
        """Drop the feed and room of a lost ring, whose ranks no longer write. Idempotent."""
        if self._feed is not None:
            self._feed.abandon(error)
        self._earlier_preemptions = self.num_preemptions
        self._feed, self._room = None, None

    def require_started(self) -> None:
        """Raise Unavailable unless the ring has an incarnation that serves."""
        if self._room is None:
            raise Unavailable(f"ring {self._ring.settings.name} is shutting down")

    def reserve(self, sequence: SequenceKv, filled: tuple[int, ...], max_tokens: int) -> int:
        """Reserve blocks as `DecodeRoom.reserve` does. Raises CapacityExceeded."""
        assert self._room is not None, "the caller requires a started engine"
        return self._room.reserve(sequence, filled, max_tokens)

    async def compute_prompt(self, turn: DecodeTurn) -> Admit:
        """Compute the tokens of a reserved turn's prompt whose KV the ring lacks, and return the turn's first token.

        All KV of the turn is on the ring then. The loop may write to the turn's blocks until this call or `leave`
        returns. Raises TurnCancelled if the turn ends before its first token, and Unavailable.
        """
        ended = TurnCancelled(f"turn {turn.turn_id} ended before its prompt was computed")
        if turn.is_ending:  # from here on there is no await before the feed has the prompt, so `leave` cannot miss it
            raise ended
        self.require_started()
        assert self._feed is not None, "started"
        request, sequence = turn.request, turn.sequence
        new = TokenRange(turn.reservation.retained_tokens, request.num_tokens)
        prompt = ComputePrompt(
            sequence_id=turn.turn_id,
            token_ids=request.draft_text[-len(new) :],
            held=sequence.shards.held,
            blocks=tuple(sequence.table(rank) for rank in range(sequence.shards.num_ranks)),
            sampling=request.sampling,
            history=TokenHistory.of(request.sampling, request.penalized_ids),
            tail=sequence.shards.newest(self._ring.model.tail_tokens),
        )
        event = await self._feed.compute(turn, prompt)
        if event.is_broken:
            raise _broken(turn, event)
        if event.token_id is None or turn.is_ending:
            raise ended
        assert event.prompt_seconds is not None, "the loop times its prompts"
        sequence.shards = sequence.shards.extend(turn.reservation.shards)
        turn.to(DecodeTurnState.SEALED)
        report = PrefillReport(
            prefill_seconds=event.prompt_seconds,
            queue_seconds=max(0.0, time.monotonic() - turn.times.reserved_at - event.prompt_seconds),
            chunks=(PlannedChunk(tokens=new, algorithm=Algorithm.DECODE_RING, num_turns=1),),
        )
        return Admit(
            turn_id=turn.turn_id,
            attempt=request.attempt,
            first_token=event.token_id,
            report=report,
            logprobs=event.logprobs,
        )

    async def enter(self, turn: DecodeTurn) -> None:
        """Decode an admitted turn as soon as the batch has a place. Raises Unavailable."""
        assert self._feed is not None and self._room is not None, "a sealed turn has a ring"
        self._room.enter(turn)
        await self._feed.join(turn)

    async def leave(self, turn: DecodeTurn) -> None:
        """Return when the decode loop writes to none of the turn's blocks.

        Raises Unavailable if the ring does not confirm that in time: the loop may still be writing.
        """
        if self._feed is None or not self._ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        timeout = self._ring.settings.control_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._feed.leave(turn)
        except TimeoutError:
            raise Unavailable(f"the decode loop did not release turn {turn.turn_id} within {timeout:.1f} s") from None

    def end(self, turn: DecodeTurn) -> None:
        """Give an ending turn no more blocks. `freed` follows."""
        if self._room is not None:
            self._room.end(turn)

    def freed(self, turn: DecodeTurn) -> None:
        """Hand out the blocks of an ended turn, which are back in their pool."""
        if self._room is not None and self._ring.is_serving(turn.reservation.incarnation):
            self._room.freed(turn)

    async def _read(self, feed: DecodeFeed, incarnation: str) -> None:
        try:
            await feed.read()
        except RingserveError as error:
            self._ring.report_lost(error, incarnation)

    def _on_event(self, turn: DecodeTurn, event: DecodeEvent) -> None:
        if event.owner is not None:
            turn.owners.append(event.owner)
        if event.is_broken:
            self._on_lost(turn, _broken(turn, event))
        if event.token_id is not None:
            turn.add_token(event.token_id, event.logprobs)
            turn.answer.num_drafted += event.is_draft
        if turn.is_ending or self._room is None:
            return
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._on_last_token(turn, event.finish_reason)
        elif event.is_starved:
            self._room.starve(turn)
        else:
            self._room.note_token(turn)


def _broken(turn: DecodeTurn, event: DecodeEvent) -> RingserveError:
    """Return the error of a turn that has no next token."""
    if not event.is_outside_grammar:
        return NotFinite.of_turn(turn.turn_id, event.kv_tokens)
    if not turn.request.sampling.grammar:
        return InvalidRequest(
            f"allowed_token_ids: no token can follow the {len(turn.answer.tokens)} tokens of the answer; allow more "
            f"tokens, or leave out bad_words or min_tokens"
        )
    return InvalidRequest(
        f"structured_outputs: no token can follow the {len(turn.answer.tokens)} tokens of the answer; the grammar has "
        f"become too complex there, so that a simpler one is needed"
    )


class _RoomActions:
    """`RoomActions` of one ring incarnation: turns grow, are preempted and come back as its `room` decides."""

    def __init__(
        self,
        ring: Ring,
        feed: DecodeFeed,
        router: RouterPort,
        spawn: Spawn,
        on_lost: Callable[[DecodeTurn, RingserveError], None],
    ) -> None:
        settings = ring.settings
        self.room = DecodeRoom(ring.pool, settings.headroom_tokens, self)
        self._ring = ring
        self._feed = feed
        self._router = router
        self._spawn = spawn
        self._on_lost = on_lost

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        self._feed.grow(turn, blocks)

    def rejoin(self, turn: DecodeTurn) -> None:
        self._feed.join_soon(turn)

    def preempt(self, turn: DecodeTurn) -> None:
        self._spawn(self._preempt(turn))

    def resume(self, turn: DecodeTurn) -> None:
        self._spawn(self._resume(turn))

    async def _preempt(self, turn: DecodeTurn) -> None:
        """Take a turn out of the batch and drop its KV for an older turn, unless it ends meanwhile."""
        try:
            async with asyncio.timeout(self._ring.settings.control_timeout):
                await self._feed.leave(turn)
        except (RingserveError, TimeoutError) as error:
            self._ring.report_lost(error, turn.reservation.incarnation)
            return
        if not turn.is_ending:
            log.info("turn %s is preempted after %d tokens", turn.turn_id, len(turn.answer.tokens))
            self.room.preempted(turn)

    async def _resume(self, turn: DecodeTurn) -> None:
        """Have the router begin a new attempt, which makes the turn's KV again.

        A turn that cannot be resumed now is preempted once more and tried again later, until its deadline. A turn that
        the router does not know ends: the router has restarted, and will never resume it.
        """
        turn.num_attempts += 1
        attempt = turn.num_attempts
        request = ResumeTurn(
            turn_id=turn.turn_id,
            attempt=attempt,
            token_ids=tuple(turn.answer.tokens[:-1]),
            deadline_seconds=turn.request.deadline_seconds,
        )
        try:
            await self._router.resume_turn(request)
        except NotFinite as error:
            self._on_lost(turn, error)
        except NotFound as error:
            lost = Unavailable(f"the router no longer knows turn {turn.turn_id}, which was preempted: {error}; retry")
            self._on_lost(turn, lost)
        except RingserveError as error:
            is_arriving = turn.state in (DecodeTurnState.RESERVED, DecodeTurnState.STREAMING)
            is_whole = turn.request.attempt == attempt and not is_arriving
            if turn.is_ending or is_whole or turn.num_attempts != attempt:
                return
            log.warning("turn %s could not be resumed, trying again: %s", turn.turn_id, error)
            turn.to(DecodeTurnState.PREEMPTED)
            if is_arriving:  # after the drop no byte of that attempt is written
                turn.tasks.stop_sealing()
                await drop(self._ring, turn.attempt.key)
            await asyncio.sleep(RESUME_PAUSE_SECONDS)
            if not turn.is_ending:
                self.room.release(turn)

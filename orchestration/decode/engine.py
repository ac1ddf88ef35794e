"""Execution on a decode ring: the feed and the room of its present incarnation, and the prompts that it computes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from ringserve.cp_core.errors import InvalidRequest, NotFinite, NotFound, RingserveError, TurnCancelled, Unavailable
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.decode.feed import DecodeFeed
from ringserve.orchestration.decode.room import DecodeRoom
from ringserve.orchestration.decode.turn import DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.plans import PlannedChunk
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.turns import Admit, PrefillReport, ResumeTurn
from ringserve.orchestration.ring.kv_pool import SequenceKv
from ringserve.orchestration.ring.kv_transfers import drop
from ringserve.orchestration.ring.life import Ring
from ringserve.workers.protocol.decode_commands import ComputePrompt, DecodeEvent, FinishReason
from ringserve.workers.protocol.prefill_steps import Algorithm, TokenIds
from ringserve.workers.sampling.parameters import TokenHistory

log = logging.getLogger(__name__)

RESUME_PAUSE_SECONDS = 0.5
"""Seconds between attempts to resume a turn that no prefill ring can take now; the turn's deadline bounds them."""

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
"""Starts work in the background, which lives at most as long as the leader."""


class DecodeEngine:
    """Feed and room of a ring. `start` makes both for a new incarnation, `stop` drops them when the ring is lost.

    Tokens go to the turns' streams; `on_last_token` is called with a turn whose answer is complete, and the reason,
    `on_lost` with a turn that cannot go on, and the error: the router no longer knows it, or its logits are not finite.
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

    async def compute_prompt(self, turn: DecodeTurn, token_ids: TokenIds) -> Admit:
        """Compute the tokens of a reserved turn's prompt whose KV the ring lacks, and return the turn's first token.

        All KV of the turn is on the ring then. The turn's blocks are written until this call or `leave` returns.
        Raises TurnCancelled if the turn ended before, Unavailable.
        """
        ended = TurnCancelled(f"turn {turn.turn_id} ended before its prompt was computed")
        if turn.is_ending:  # no await follows before the feed knows of the prompt, where `leave` finds it
            raise ended
        self.require_started()
        assert self._feed is not None, "started"
        request, sequence = turn.request, turn.sequence
        new = TokenRange(turn.reservation.retained_tokens, request.num_tokens)
        prompt = ComputePrompt(
            sequence_id=turn.turn_id,
            token_ids=token_ids[new.start : new.stop],
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
            if is_arriving:  # no byte of that attempt is written after this
                turn.tasks.stop_sealing()
                await drop(self._ring, turn.attempt.key)
            await asyncio.sleep(RESUME_PAUSE_SECONDS)
            if not turn.is_ending:
                self.room.release(turn)

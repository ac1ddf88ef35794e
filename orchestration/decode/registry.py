"""Registry of a decode ring's turns for its leader. It ends each turn once, after all writers to its blocks stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator

from ringserve.cp_core.errors import (
    LOSSES,
    Busy,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.orchestration.decode.engine import DecodeEngine, Spawn
from ringserve.orchestration.decode.turn import Answer, DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.inventory import TurnOnRing
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.turns import EndingEvent, FinishedEvent, TokensEvent, TurnEvent, TurnOutcome
from ringserve.orchestration.ring.kv_transfers import drop
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.tasks import gather_all, until_reached
from ringserve.workers.protocol.steps import FinishReason

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""A turn's lease ends this long after its deadline. Then the router has ended the turn itself, and need not be told."""
TELL_SECONDS = 3.0
"""Seconds that the end of a turn waits for the router's answer; after that, the router is told in the background."""


class TurnReader:
    """Reader of a turn's events after its first `after` tokens. The next reader of the turn takes its place.

    All tokens not read yet come as one event. With an `interval`, the next tokens are held back until so many seconds
    after the previous tokens were given. Events that precede the first token are given only to a reader that has no
    tokens: one that has tokens has had them.
    """

    def __init__(self, turn: DecodeTurn, after: int, interval: float = 0.0) -> None:
        self.turn = turn
        self._interval = interval
        self._due = 0.0  # on the event loop's clock
        self._num_tokens = after
        self._num_opening = 0
        self._has_ending = False
        turn.reader = self
        turn.changed.set()

    async def next(self) -> TurnEvent:
        """Return the next event. Raises the error that ended the turn, and Busy if another reads it now."""
        turn = self.turn
        while True:
            if turn.reader is not self:
                raise Busy(f"turn {turn.turn_id} is read by another stream")
            if self._interval and await self._has_held_back():
                continue
            event = self._take()
            if isinstance(event, RingserveError):
                raise event
            if event is not None:
                return event
            turn.changed.clear()
            await turn.changed.wait()

    async def _has_held_back(self) -> bool:
        """Wait until tokens that have come may be given; not after the turn's end. Return whether there was a wait."""
        has_tokens, clock = self._num_tokens < len(self.turn.answer.tokens), asyncio.get_running_loop().time
        left = self._due - clock()
        if has_tokens and left > 0.0 and self.turn.end is None:
            await asyncio.sleep(left)
            return True
        if has_tokens:
            self._due = clock() + self._interval
        return False

    def _take(self) -> TurnEvent | RingserveError | None:
        turn, answer = self.turn, self.turn.answer
        if not self._num_tokens and self._num_opening < len(turn.opening):
            self._num_opening += 1
            return turn.opening[self._num_opening - 1]
        if self._num_tokens < len(answer.tokens):
            return self._take_tokens(answer)
        if answer.own_end is not None and turn.end is None and not self._has_ending:
            self._has_ending = True
            return EndingEvent(finish_reason=answer.own_end)
        return turn.end

    def _take_tokens(self, answer: Answer) -> TokensEvent:
        """Return the tokens not read yet. Tokens with log-probabilities and tokens without come in separate events."""
        start, first_scored = self._num_tokens, len(answer.tokens) - len(answer.logprobs)
        stop = first_scored if start < first_scored else len(answer.tokens)
        self._num_tokens = stop
        logprobs = answer.logprobs[start - first_scored :] if start >= first_scored else []
        return TokensEvent(token_ids=tuple(answer.tokens[start:stop]), logprobs=tuple(logprobs))


class DecodeTurns:
    """Turns by id, from `add` until their blocks are settled: finished, failed, cancelled or expired.

    The router is told of an end until it answers or the turn's lease ends, even after the turn is no longer registered.
    A turn whose reader has gone runs on for the orphan timeout; within it the same gateway or another may read it
    again. A turn that has ended stays readable for the orphan timeout, or for the attach timeout if nobody has read it.
    `on_settled` is called with each turn whose blocks are settled.
    """

    def __init__(
        self,
        ring: Ring,
        engine: DecodeEngine,
        router: RouterPort,
        spawn: Spawn,
        on_settled: Callable[[DecodeTurn], None],
    ) -> None:
        self._ring = ring
        self._settings = ring.settings
        self._engine = engine
        self._router = router
        self._spawn = spawn
        self._on_settled = on_settled
        self._turns: dict[str, DecodeTurn] = {}
        self._ended: dict[str, DecodeTurn] = {}
        self._untold: dict[str, DecodeTurn] = {}

    def __iter__(self) -> Iterator[DecodeTurn]:
        return iter(self._turns.values())

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_unfinished(self) -> int:
        """Turns that are not over, and turns that are over and that no stream has begun to read."""
        return len(self._turns) + sum(turn.reader is None for turn in self._ended.values())

    def inventory(self) -> tuple[TurnOnRing, ...]:
        """Return the turns that hold KV, and those whose end the router has not heard."""
        return tuple(_on_ring(turn) for turn in {**self._untold, **self._turns}.values())

    def add(self, turn: DecodeTurn) -> None:
        """Register a turn."""
        self._turns[turn.turn_id] = turn

    def get(self, turn_id: str) -> DecodeTurn | None:
        """Return the turn, if it is registered."""
        return self._turns.get(turn_id)

    def find(self, turn_id: str) -> DecodeTurn | None:
        """Return the turn, which may have ended a while ago."""
        return self._turns.get(turn_id) or self._ended.get(turn_id)

    def under_way(self, turn_id: str) -> DecodeTurn | None:
        """Return the turn, unless it is ending."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.is_ending else turn

    def read(self, turn_id: str, after: int, interval: float = 0.0) -> TurnReader:
        """Return a reader of the turn, which may have ended. It replaces the one before. Raises NotFound."""
        turn = self.find(turn_id)
        if turn is None:
            raise NotFound(f"turn {turn_id} is not known on decode ring {self._settings.name}")
        return TurnReader(turn, after, interval)

    def leave(self, reader: TurnReader) -> None:
        """Note that a reader has gone: the turn ends unless another comes in time."""
        turn, timeout = reader.turn, self._settings.orphan_timeout
        if turn.reader is reader and not turn.is_ending:
            timer = asyncio.get_running_loop().call_later(timeout, self._end_if_orphaned, turn, reader)
            turn.tasks.timers.append(timer)

    def _end_if_orphaned(self, turn: DecodeTurn, reader: TurnReader) -> None:
        if turn.reader is reader:
            self.end_soon(turn, TurnCancelled("the client went away"))

    def watch(self, turn: DecodeTurn) -> None:
        """End the turn at its deadline, or after the attach timeout if no stream has claimed it."""
        seconds, attach_timeout = turn.request.deadline_seconds, self._settings.attach_timeout
        expired = DeadlineExceeded(f"the turn did not end within its deadline of {seconds:.1f} s")
        unclaimed = TurnCancelled(f"no client read the turn's tokens within {attach_timeout:.0f} s")
        loop = asyncio.get_running_loop()
        turn.tasks.timers = [
            loop.call_later(seconds, self.end_soon, turn, expired),
            loop.call_later(attach_timeout, self._end_if_unclaimed, turn, unclaimed),
        ]

    def _end_if_unclaimed(self, turn: DecodeTurn, error: RingserveError) -> None:
        if turn.reader is None:
            self.end_soon(turn, error)

    async def until_settled(self, kv_id: str) -> None:
        """Wait for ending turns of the sequence: the router may already know of an end, and begin the next turn.

        The wait ends after the control timeout; the pool then refuses the new turn, and names the one that holds the
        sequence.
        """
        turns = [turn for turn in self._turns.values() if turn.request.kv_id == kv_id]
        await self._until_over(turns, self._settings.control_timeout)

    def end_soon(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        """Start to end a turn. The first call decides how it ends."""
        if turn.tasks.ending is None:
            turn.error = how if isinstance(how, RingserveError) else None
            turn.tasks.ending = self._spawn(self._end(turn, how))
            self._engine.end(turn)

    async def end(self, turn_id: str, error: RingserveError) -> None:
        """End a turn in any state; return when its blocks are settled. Idempotent."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self.end_soon(turn, error)
            await self._until_over([turn], None)

    def end_all(self, error: RingserveError) -> None:
        """Start to end every turn."""
        for turn in list(self._turns.values()):
            self.end_soon(turn, error)

    async def until_over(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for turns that are ending."""
        await self._until_over(self._turns.values(), timeout)

    async def _until_over(self, turns: Iterable[DecodeTurn], timeout: float | None) -> None:
        """Wait at most `timeout` seconds. None is safe, because every step of an end has a deadline of its own."""
        endings = [turn.tasks.ending for turn in turns if turn.tasks.ending is not None]
        if endings:
            await asyncio.wait(endings, timeout=timeout)

    async def refuse(self, turn: DecodeTurn) -> None:
        """Undo a failed reservation, whose caller gets the error; no stream reads the turn.

        If the turn was aborted meanwhile, its end undoes the reservation.
        """
        if turn.tasks.ending is None:
            turn.tasks.ending = self._spawn(self._undo(turn))
            self._engine.end(turn)
        await self._until_over([turn], None)

    async def _undo(self, turn: DecodeTurn) -> None:
        turn.tasks.stop_timers()
        try:
            await self._stop_writers(turn)
        finally:
            self._remove(turn, DecodeTurnState.ABORTED)
        self._settle(turn, turn.reservation.retained_tokens)

    async def _end(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        turn.tasks.stop_timers()
        if turn.answer.num_finished is not None and not isinstance(how, RingserveError):
            how = await self._cut(turn, how)
        has_failed = isinstance(how, RingserveError)
        try:
            if has_failed:
                await self._stop_writers(turn)
            num_retained = await self._tell_router(turn, self._outcome(turn, how))
            if has_failed:
                await self._give_up_sends(turn)
            await turn.tasks.until_idle()
        finally:
            self._remove(turn, DecodeTurnState.ABORTED if has_failed else DecodeTurnState.DONE)
        self._settle(turn, num_retained)
        self._on_settled(turn)
        num_tokens = len(turn.answer.tokens)
        log.info("turn %s ended with %d tokens: %s", turn.turn_id, num_tokens, how, extra=turn.request.log_fields)
        turn.end_with(how if isinstance(how, RingserveError) else _finished(turn, how))
        self._ended[turn.turn_id] = turn
        seconds = self._settings.attach_timeout if turn.reader is None else self._settings.orphan_timeout
        asyncio.get_running_loop().call_later(seconds, self._ended.pop, turn.turn_id, None)

    def _remove(self, turn: DecodeTurn, state: DecodeTurnState) -> None:
        turn.to(state)
        self._turns.pop(turn.turn_id, None)

    def _settle(self, turn: DecodeTurn, num_retained: int) -> None:
        """Unpin the turn's sequence, to whose blocks no rank writes any more."""
        turn.pool.settle(turn.request.kv_id, turn.turn_id, num_retained, is_guest=turn.request.is_spare)
        self._engine.freed(turn)

    async def _cut(self, turn: DecodeTurn, how: FinishReason) -> FinishReason | RingserveError:
        """Stop decoding a turn whose answer is complete, and drop the tokens after it."""
        try:
            await self._engine.leave(turn)
        except RingserveError as error:
            # The loop may still write to the turn's blocks, which other turns get next.
            self._ring.report_lost(error, turn.reservation.incarnation)
            return Unavailable(f"ring {self._settings.name} could not end turn {turn.turn_id}: {error}")
        turn.cut()
        return how

    async def _stop_writers(self, turn: DecodeTurn) -> None:
        """Return when neither a receiver nor the decode loop writes to the turn's blocks."""
        turn.tasks.stop_sealing()
        if not self._ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        try:
            await self._engine.leave(turn)
        except RingserveError as error:
            self._ring.report_lost(error, turn.reservation.incarnation)  # as in `_cut`
            return
        await drop(self._ring, turn.attempt.key)

    async def _give_up_sends(self, turn: DecodeTurn) -> None:
        """End the turn's transfers to other rings: a destination that stands still would hold the turn for seconds."""
        keys, timeout = list(turn.tasks.sends.values()), self._settings.control_timeout
        if not self._ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        try:
            await gather_all(rank.abandon_send(key, timeout) for key in keys for rank in self._ring.ranks)
        except RingserveError as error:
            log.info("sends of turn %s could not be given up, and end by themselves: %s", turn.turn_id, error)

    async def _tell_router(self, turn: DecodeTurn, outcome: TurnOutcome) -> int:
        """Tell the router of an end, and return how many tokens to retain.

        If the router does not answer within TELL_SECONDS, the ring retains all KV of a turn that ended well in a
        conversation; the next turn cuts it to what it matches.
        """
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawn(self._tell(turn, outcome, told))
        await asyncio.wait([told], timeout=TELL_SECONDS)
        if told.done():
            return told.result()
        log.warning("the router has not heard yet that turn %s has ended", turn.turn_id)
        has_conversation = turn.request.kv_id != turn.turn_id
        return turn.note_decoded().num_tokens if has_conversation and outcome.ok else 0

    def _outcome(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> TurnOutcome:
        if isinstance(how, RingserveError):
            lost = "prefill" if self._ring.is_serving(turn.reservation.incarnation) else "decode"
            return TurnOutcome(turn_id=turn.turn_id, ok=False, lost_role=lost if isinstance(how, LOSSES) else "")
        shards = turn.note_decoded()
        return TurnOutcome(
            turn_id=turn.turn_id,
            ok=True,
            finish_reason=how,
            token_ids=tuple(turn.answer.tokens),
            kv_tokens=shards.num_tokens,
            shards=shards,
        )

    async def _tell(self, turn: DecodeTurn, outcome: TurnOutcome, told: asyncio.Future[int]) -> None:
        """Tell the router of an end until it has heard it; `told` gets the number of tokens to retain."""
        age = time.monotonic() - turn.times.reserved_at
        until = asyncio.get_running_loop().time() + turn.request.deadline_seconds + LEASE_SECONDS - age
        what = f"the router could not be told the end of turn {turn.turn_id}"
        self._untold[turn.turn_id] = turn
        try:
            num_retained = await until_reached(lambda: self._router.end_turn(outcome), what, until)
        except RingserveError as error:
            log.warning("%s: %s", what, error)
            num_retained = 0
        finally:
            del self._untold[turn.turn_id]
        if not told.done():
            told.set_result(num_retained)


def _on_ring(turn: DecodeTurn) -> TurnOnRing:
    states = (DecodeTurnState.RESERVED, DecodeTurnState.STREAMING)
    return TurnOnRing(
        turn_id=turn.turn_id,
        kv_id=turn.request.kv_id,
        attempt=turn.request.attempt,
        retained_tokens=turn.reservation.retained_tokens,
        is_begun=turn.tasks.prefilling is not None,
        is_sealed=turn.is_ending or turn.state not in states,
    )


def _finished(turn: DecodeTurn, reason: FinishReason) -> FinishedEvent:
    return FinishedEvent(
        finish_reason=reason,
        migrated_bytes=turn.times.migrated_bytes,
        migration_seconds=turn.times.migration_seconds,
        handoff_seconds=turn.times.handoff_seconds,
        accepted_drafts=turn.answer.num_drafted,
    )

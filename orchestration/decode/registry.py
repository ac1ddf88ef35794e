"""How turns end on a decode ring: each once, whatever ended it, after all who could write to its blocks have let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable

from cp_core.errors import Busy, DeadlineExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from orchestration.decode.engine import DecodeEngine
from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.handoff import HandoffState
from orchestration.protocol.ports import RouterPort
from orchestration.protocol.turns import FinishedEvent, TurnOutcome
from orchestration.ring.kv_transfers import drop
from orchestration.ring.life import Ring
from workers.protocol.decode_commands import FinishReason

log = logging.getLogger(__name__)


class DecodeTurns:
    """The ring's turns by id, and the way out for each of them: finished, failed, cancelled or expired.

    A turn is here from `add` until its blocks are settled. One that ends before its stream has come stays readable
    for the attach timeout. `spawn` runs work in the background for as long as the leader lives, `on_settled` is told of
    each turn whose blocks are settled.
    """

    def __init__(
        self,
        ring: Ring,
        engine: DecodeEngine,
        router: RouterPort,
        spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]],
        on_settled: Callable[[DecodeTurn], None],
    ) -> None:
        self._ring = ring
        self._settings = ring.settings
        self._engine = engine
        self._router = router
        self._spawn = spawn
        self._on_settled = on_settled
        self._turns: dict[str, DecodeTurn] = {}
        self._unread: dict[str, DecodeTurn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def num_unfinished(self) -> int:
        """Turns that are not over, or whose end nobody has read yet."""
        return len(self._turns) + len(self._unread)

    def add(self, turn: DecodeTurn) -> None:
        self._turns[turn.turn_id] = turn

    def of_turn(self, turn_id: str) -> DecodeTurn | None:
        return self._turns.get(turn_id)

    def under_way(self, turn_id: str) -> DecodeTurn | None:
        """The turn, unless it is ending."""
        turn = self._turns.get(turn_id)
        return None if turn is None or turn.is_ending else turn

    def claim(self, turn_id: str) -> DecodeTurn:
        """The turn, or what it left, for the one stream that reads its events. Raises NotFound, Busy."""
        turn = self._turns.get(turn_id) or self._unread.pop(turn_id, None)
        if turn is None:
            raise NotFound(f"turn {turn_id} is not known on decode ring {self._settings.name}")
        if turn.is_streamed:
            raise Busy(f"turn {turn_id} is read by another stream")
        turn.is_streamed = True
        return turn

    def watch(self, turn: DecodeTurn) -> None:
        """End the turn at its deadline, and where nobody comes to read it."""
        seconds, attach_timeout = turn.request.deadline_seconds, self._settings.attach_timeout
        expired = DeadlineExceeded(f"the turn did not end within its deadline of {seconds:.1f} s")
        unclaimed = TurnCancelled(f"nobody read the turn's tokens within {attach_timeout:.0f} s")
        loop = asyncio.get_running_loop()
        turn.timers = [
            loop.call_later(seconds, self.end_soon, turn, expired),
            loop.call_later(attach_timeout, self._end_if_unclaimed, turn, unclaimed),
        ]

    def _end_if_unclaimed(self, turn: DecodeTurn, error: RingserveError) -> None:
        if not turn.is_streamed:
            self.end_soon(turn, error)

    async def until_settled(self, kv_id: str) -> None:
        """Wait for the sequence's turns that are ending: the router may know their end already, and go on with it."""
        await self._until_over(
            [turn for turn in self._turns.values() if turn.request.kv_id == kv_id],
            self._settings.control_timeout,  # then the pool says what it waits for
        )

    def end_soon(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        """The first call decides how the turn ends."""
        if turn.ending is None:
            turn.ending = self._spawn(self._end(turn, how))
            self._engine.ending(turn)

    async def end(self, turn_id: str, error: RingserveError) -> None:
        """End a turn in any state; returns when its blocks are settled. Idempotent."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self.end_soon(turn, error)
            await self._until_over([turn], None)

    def end_all(self, error: RingserveError) -> None:
        """End every turn soon."""
        for turn in list(self._turns.values()):
            self.end_soon(turn, error)

    async def until_over(self, timeout: float) -> None:
        """Wait for turns that are ending, `timeout` seconds at most."""
        await self._until_over(self._turns.values(), timeout)

    async def _until_over(self, turns: Iterable[DecodeTurn], timeout: float | None) -> None:
        """None: each thing that an end waits for has a deadline of its own."""
        endings = [turn.ending for turn in turns if turn.ending is not None]
        if endings:
            await asyncio.wait(endings, timeout=timeout)

    async def refuse(self, turn: DecodeTurn) -> None:
        """Undo a reservation that came to nothing; whoever asked for it learns why, and nobody reads the turn.

        Where it was aborted meanwhile, that undoes it.
        """
        if turn.ending is None:
            turn.ending = self._spawn(self._undo(turn))
            self._engine.ending(turn)
        await self._until_over([turn], None)

    async def _undo(self, turn: DecodeTurn) -> None:
        try:
            await self._let_go(turn)
        finally:
            self._take_out(turn, HandoffState.ABORTED)
        self._settle(turn, turn.reservation.retained_tokens)

    async def _end(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        turn.stop_timers()
        if turn.num_finished is not None and not isinstance(how, RingserveError):
            how = await self._cut(turn, how)
        failed = isinstance(how, RingserveError)
        try:
            if failed:
                await self._let_go(turn)
            keep = await self._tell_router(turn, failed)
            await asyncio.gather(*turn.sends, *filter(None, [turn.copying, turn.prefilling]), return_exceptions=True)
        finally:
            self._take_out(turn, HandoffState.ABORTED if failed else HandoffState.DONE)
        self._settle(turn, keep)
        self._on_settled(turn)
        log.info("turn %s ended with %d tokens: %s", turn.turn_id, len(turn.tokens), how, extra=turn.request.log_fields)
        turn.events.put_nowait(how if isinstance(how, RingserveError) else _finished(turn, how))
        if not turn.is_streamed:
            self._unread[turn.turn_id] = turn
            forget = asyncio.get_running_loop().call_later
            forget(self._settings.attach_timeout, self._unread.pop, turn.turn_id, None)

    def _take_out(self, turn: DecodeTurn, state: HandoffState) -> None:
        turn.state = turn.state.to(state)
        self._turns.pop(turn.turn_id, None)

    def _settle(self, turn: DecodeTurn, retain_tokens: int) -> None:
        """Nobody writes to the turn's blocks any more."""
        turn.pool.settle(turn.request.kv_id, turn.turn_id, retain_tokens)
        self._engine.freed(turn)

    async def _cut(self, turn: DecodeTurn, how: FinishReason) -> FinishReason | RingserveError:
        """Stop decoding a turn whose answer is complete, and forget what came after it."""
        try:
            await self._engine.leave(turn)
        except RingserveError as error:
            # As in `_let_go`: it may still be writing.
            self._ring.report_lost(error, turn.reservation.incarnation)
            return Unavailable(f"ring {self._settings.name} could not end turn {turn.turn_id}: {error}")
        turn.cut()
        return how

    async def _let_go(self, turn: DecodeTurn) -> None:
        """After this neither a receiver nor the decode loop writes to the turn's blocks."""
        if turn.sealing is not None:
            turn.sealing.cancel()
        if not self._ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        try:
            await self._engine.leave(turn)
        except RingserveError as error:
            # A decode loop that may still write to the turn's blocks would write into blocks of others.
            self._ring.report_lost(error, turn.reservation.incarnation)
            return
        await drop(self._ring, turn.key)

    async def _tell_router(self, turn: DecodeTurn, failed: bool) -> int:
        """How many tokens to keep. A router that cannot be told keeps nothing."""
        if failed:
            outcome = TurnOutcome(turn_id=turn.turn_id, ok=False)
        else:
            shards = turn.note_decoded()
            outcome = TurnOutcome(
                turn_id=turn.turn_id,
                ok=True,
                token_ids=tuple(turn.tokens),
                kv_tokens=shards.num_tokens,
                shards=shards,
            )
        try:
            return await self._router.end_turn(outcome)
        except RingserveError as error:
            log.warning("the router could not be told the end of turn %s: %s", turn.turn_id, error)
            return 0


def _finished(turn: DecodeTurn, reason: FinishReason) -> FinishedEvent:
    return FinishedEvent(
        finish_reason=reason,
        migrated_bytes=turn.migrated_bytes,
        migration_seconds=turn.migration_seconds,
        handoff_seconds=turn.handoff_seconds,
    )

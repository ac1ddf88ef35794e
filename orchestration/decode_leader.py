"""The leader of a decode ring: reserves room, seals transfers, decodes turns in one batch, keeps KV between turns."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from cp_core.layout import ShardMap, spread
from orchestration.block_copies import copy_blocks
from orchestration.decode_batch import DecodeBatch
from orchestration.decode_preemption import Preemption
from orchestration.decode_pull import send_back
from orchestration.decode_room import DecodeRoom
from orchestration.decode_turn import DecodeTurn
from orchestration.group import GroupLeader
from orchestration.handoff import HandoffState
from orchestration.ports import RankFactory, RouterPort
from orchestration.ring import GroupSettings, gather_all, gather_first_error
from orchestration.turn import (
    Admit,
    EndingEvent,
    FinishedEvent,
    GroupRegistration,
    GroupStatus,
    Reservation,
    Reserve,
    ScoredEvent,
    SendKv,
    SentKv,
    TokensEvent,
    TurnEvent,
    TurnOutcome,
)
from workers.steps import DecodeEvent, FinishReason, KvExpect, TokenLogprobs, TransferKey

log = logging.getLogger(__name__)

CAUSE_SECONDS = 1.0
"""How long a failed hand-off waits to be told why it failed."""


class DecodeLeader(GroupLeader):
    """Owns one decode ring. Every turn ends once, through `_end`: finished, failed, cancelled or expired."""

    def __init__(
        self,
        settings: GroupSettings,
        factory: RankFactory,
        router: RouterPort,
        announce: Callable[[GroupRegistration], Awaitable[int]],
    ) -> None:
        super().__init__(settings, factory, announce)
        self._router = router
        self._turns: dict[str, DecodeTurn] = {}
        self._unread: dict[str, DecodeTurn] = {}  # ended before their stream came; for a while
        self._arrivals = itertools.count()
        self._batch: DecodeBatch | None = None
        self._room: DecodeRoom | None = None
        self._earlier_preemptions = 0  # of incarnations that are gone

    async def on_ready(self) -> None:
        """A new incarnation of the ring has an empty batch of its own."""
        settings, incarnation = self.settings, self.ring.incarnation
        batch = DecodeBatch(
            self.ring.ranks[0],
            settings.max_batch,
            settings.control_timeout,
            self._on_event,
            continuous=settings.continuous,
        )
        self._batch = batch
        self._room = Preemption(self.ring, batch, self._router, self.spawn).room
        self.spawn(self._read(batch, incarnation))
        await super().on_ready()

    async def _read(self, batch: DecodeBatch, incarnation: str) -> None:
        try:
            await batch.read()
        except RingserveError as error:
            self.ring.report_lost(error, incarnation)

    # --- the verbs of DecodeService ----------------------------------------------------------------------------------

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence, set blocks aside, and make the ranks expect the KV. Idempotent per attempt."""
        await self._until_settled(request.sequence_id)
        known = self._turns.get(request.turn_id)
        if known is not None:
            if request.attempt > known.request.attempt:
                await self._reserve_again(known, request)
            return known.reservation
        self.ring.require_ready()
        if self._room is None:
            raise Unavailable(f"ring {self.settings.name} is shutting down")
        limit = self.settings.max_batch + self.settings.max_waiting
        if len(self._turns) >= limit:
            raise CapacityExceeded(
                f"decode ring {self.settings.name}: {len(self._turns)} turns are under way and at most {limit} are "
                f"allowed; retry later"
            )
        turn = self._pin(request)
        self._turns[request.turn_id] = turn
        turn.copying = asyncio.create_task(
            copy_blocks(self.ring, turn.pool, turn.sequence, turn.reservation.incarnation)
        )
        try:
            await asyncio.shield(turn.copying)
            await self._expect(turn)
        except RingserveError:
            self._turns.pop(request.turn_id, None)  # where it was aborted meanwhile it is gone already
            await self._let_go(turn)
            turn.pool.settle(request.sequence_id, request.turn_id, turn.reservation.kept_tokens)
            self._freed(turn)
            raise
        loop = asyncio.get_running_loop()
        expired = DeadlineExceeded(f"the turn did not end within its deadline of {request.deadline_seconds:.1f} s")
        unclaimed = TurnCancelled(f"nobody read the turn's tokens within {self.settings.attach_timeout:.0f} s")
        turn.timers = [
            loop.call_later(request.deadline_seconds, self._end_soon, turn, expired),
            loop.call_later(self.settings.attach_timeout, self._end_if_unclaimed, turn, unclaimed),
        ]
        turn.sealing = self.spawn(self._seal(turn))
        return turn.reservation

    async def _until_settled(self, sequence_id: str) -> None:
        """A turn whose end the router knows may be about to settle here, and the sequence's next one comes already."""
        ending = [turn for turn in self._turns.values() if turn.request.sequence_id == sequence_id and turn.is_ending]
        try:
            async with asyncio.timeout(self.settings.control_timeout):
                for turn in ending:
                    await turn.over.wait()
        except TimeoutError:
            return  # `pin` says what it waits for

    def _pin(self, request: Reserve) -> DecodeTurn:
        pool = self.ring.pool
        sequence = pool.pin(request.sequence_id, request.turn_id, request.match_tokens)
        kept, held = sequence.shards.num_tokens, sequence.shards.held
        coming = spread(kept, request.num_tokens - kept, held)
        assert self._room is not None, "asked for before"
        try:
            room = self._room.reserve(sequence, sequence.shards.extend(coming).held, request.sampling.max_tokens)
        except CapacityExceeded:
            pool.settle(request.sequence_id, request.turn_id, kept)
            raise
        return DecodeTurn(
            request,
            self._key(request),
            pool,
            sequence,
            self._reservation(kept, coming),
            arrival=next(self._arrivals),
            prompt_tokens=request.num_tokens,
            room=room,
        )

    def _key(self, request: Reserve) -> TransferKey:
        return TransferKey(request.turn_id, request.attempt, request.source_incarnation, self.ring.incarnation)

    def _reservation(self, kept_tokens: int, coming: ShardMap) -> Reservation:
        return Reservation(
            incarnation=self.ring.incarnation,
            kept_tokens=kept_tokens,
            shards=coming,
            kv_endpoints=self.ring.kv_endpoints,
            tp=self.settings.tp,
        )

    async def _reserve_again(self, turn: DecodeTurn, request: Reserve) -> None:
        """The router follows `resume`: the blocks are there, and KV comes once more, of prompt and answer so far."""
        if turn.is_ending or turn.state is not HandoffState.PREEMPTED or request.num_tokens != turn.kv_tokens:
            raise NotFound(f"turn {turn.turn_id} does not wait to be resumed on decode ring {self.settings.name}")
        self.ring.require_ready(turn.reservation.incarnation)
        turn.request, turn.key = request, self._key(request)
        turn.reservation = self._reservation(0, spread(0, request.num_tokens, turn.sequence.shards.held))
        turn.state = turn.state.to(HandoffState.RESERVED)
        await self._expect(turn)
        turn.sealing = self.spawn(self._seal(turn))

    async def _expect(self, turn: DecodeTurn) -> None:
        held, coming = turn.sequence.shards.held, turn.reservation.shards.ranks
        expects = [
            KvExpect(turn.key, coming[rank], held[rank], turn.sequence.table(rank)) for rank in self.ring.cp_ranks
        ]
        timeout = self.settings.control_timeout
        calls = zip(self.ring.ranks, expects, strict=True)
        await gather_all(port.expect_kv(expect, timeout) for port, expect in calls)

    async def _seal(self, turn: DecodeTurn) -> None:
        """Wait until every rank has its share whole; the deadline is the turn's own."""
        timeout = turn.request.deadline_seconds
        try:
            reports = await gather_first_error(port.await_kv(turn.key, timeout) for port in self.ring.ranks)
        except RingserveError as error:
            # A sender seldom gives up without a cause: the router, which learns it now, has the first word.
            await asyncio.sleep(CAUSE_SECONDS)
            self._end_soon(turn, Unavailable(f"the KV hand-off to ring {self.settings.name} failed: {error}"))
            return
        turn.state = turn.state.to(HandoffState.SEALED)
        turn.sequence.shards = turn.sequence.shards.extend(turn.reservation.shards)
        turn.migrated_bytes += sum(report.payload_bytes for report in reports)
        turn.migration_seconds += max(report.seconds for report in reports)
        await self._advance(turn)

    async def admit(self, admit: Admit) -> None:
        """The prefill ring's first token: it goes to the client at once, decoding waits for the seal. Idempotent."""
        turn = self._turns.get(admit.turn_id)
        if turn is None or turn.is_ending or admit.attempt != turn.request.attempt:
            raise NotFound(f"turn {admit.turn_id} is not waiting on decode ring {self.settings.name}")
        if turn.tokens:
            return  # told again; or of a later attempt, whose last token the client has already
        turn.report, turn.first_token_at = admit.report, time.monotonic()
        turn.tokens.append(admit.first_token)
        turn.events.put_nowait(admit.report)
        if admit.prompt_logprobs:
            turn.events.put_nowait(ScoredEvent(logprobs=admit.prompt_logprobs))
        turn.events.put_nowait(_tokens_event(admit.first_token, admit.logprobs))
        if turn.state is HandoffState.RESERVED:
            turn.state = turn.state.to(HandoffState.STREAMING)
        await self._advance(turn)

    async def _advance(self, turn: DecodeTurn) -> None:
        if turn.state not in (HandoffState.SEALED, HandoffState.ADMITTED) or not turn.tokens or turn.is_ending:
            return
        if turn.num_finished is not None:
            self._end_soon(turn, turn.finish_reason)
            return
        if turn.state is HandoffState.ADMITTED:
            return
        reason = turn.finish_reason_of(turn.tokens[-1])
        if reason is not None:
            self._no_more_tokens(turn, reason)
            return
        turn.state = turn.state.to(HandoffState.ADMITTED)
        assert self._batch is not None and self._room is not None, "a sealed turn has a ring"
        self._room.enter(turn)
        await self._batch.join(turn)

    def _on_event(self, turn: DecodeTurn, event: DecodeEvent) -> None:
        if event.token_id is not None:
            if len(turn.tokens) == 1:
                turn.note_first_step()
            turn.tokens.append(event.token_id)
            turn.events.put_nowait(_tokens_event(event.token_id, event.logprobs))
        if turn.is_ending or self._room is None:
            return
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._no_more_tokens(turn, event.finish_reason)
        elif event.is_paused:
            self._room.pause(turn)
        else:
            self._room.note_token(turn)

    def _no_more_tokens(self, turn: DecodeTurn, reason: FinishReason) -> None:
        """The turn is over, unless its reader may find that it was over before."""
        if not turn.request.sampling.ends_by_text:
            self._end_soon(turn, reason)
        elif turn.own_end is None:
            turn.own_end = reason
            turn.events.put_nowait(EndingEvent(finish_reason=reason))

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        """End a turn well after its first `num_tokens` tokens; later ones, and their KV, are discarded.

        The stream tells the end. Idempotent: the first word counts, and a turn that is over stays as it ended. One
        that gave way to another, and is being resumed, ends when it is back.
        """
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_ending:
            return
        turn.finish(num_tokens)
        await self._advance(turn)

    async def stream_turn(self, turn_id: str) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events; closing the iterator early aborts the turn. Raises what ended a failed turn."""
        turn = self._turns.get(turn_id) or self._unread.pop(turn_id, None)
        if turn is None:
            raise NotFound(f"turn {turn_id} is not known on decode ring {self.settings.name}")
        if turn.is_streamed:
            raise Busy(f"turn {turn_id} is read by another stream")
        turn.is_streamed = True
        try:
            while True:
                event = await turn.events.get()
                if isinstance(event, RingserveError):
                    raise event
                yield event
                if isinstance(event, FinishedEvent):
                    return
        finally:
            self._end_soon(turn, TurnCancelled("the client went away"))

    async def send_kv(self, request: SendKv) -> SentKv:
        """Send kept tokens back to a prefill ring. The sequence stays pinned until the ranks have let go of it."""
        self.ring.require_ready(request.source_incarnation)
        turn_id = request.transfer_id.partition("/")[0]
        turn = self._turns.get(turn_id)
        if turn is None or turn.is_ending:
            raise NotFound(f"turn {turn_id} holds no KV on decode ring {self.settings.name}")
        return await send_back(self.ring, turn, request)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """End a turn in any state; returns when its blocks are settled. Idempotent."""
        turn = self._turns.get(turn_id)
        if turn is not None:
            self._end_soon(turn, error)
            await turn.over.wait()

    async def settle(self, sequence_id: str, turn_id: str, keep_tokens: int) -> None:
        """Cut an idle sequence to its first `keep_tokens` tokens; 0 frees it."""
        self.ring.pool.settle(sequence_id, turn_id, keep_tokens)

    async def measure(self) -> None:
        """The decode loop owns the ranks' compute threads, and no plan asks for this ring's rates."""

    @property
    def num_running(self) -> int:
        """Turns in the decode batch."""
        return self._batch.num_running if self._batch else 0

    @property
    def num_preemptions(self) -> int:
        """How often a turn gave its blocks to an older one."""
        return self._earlier_preemptions + (self._room.num_preemptions if self._room else 0)

    @property
    def num_turns(self) -> int:
        return len(self._turns) + len(self._unread)

    async def get_status(self) -> GroupStatus:
        status = self.status_with(running=self.num_running, waiting=len(self._turns) - self.num_running)
        return replace(status, num_preemptions=self.num_preemptions)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end_soon(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        """The first call decides how the turn ends."""
        if turn.ending is None:
            turn.ending = self.spawn(self._end(turn, how))
            if self._room is not None:
                self._room.end(turn)

    def _end_if_unclaimed(self, turn: DecodeTurn, error: RingserveError) -> None:
        if not turn.is_streamed:
            self._end_soon(turn, error)

    async def _end(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        turn.stop_timers()
        if turn.num_finished is not None and not isinstance(how, RingserveError):
            how = await self._cut(turn, how)
        failed = isinstance(how, RingserveError)
        try:
            if failed:
                await self._let_go(turn)
            keep = await self._tell_router(turn, failed)
            await asyncio.gather(*turn.pulls, *filter(None, [turn.copying]), return_exceptions=True)
        finally:
            turn.state = turn.state.to(HandoffState.ABORTED if failed else HandoffState.DONE)
            self._turns.pop(turn.turn_id, None)
        turn.pool.settle(turn.request.sequence_id, turn.turn_id, keep)
        self._freed(turn)
        log.info("turn %s ended with %d tokens: %s", turn.turn_id, len(turn.tokens), how, extra=turn.request.log_fields)
        turn.events.put_nowait(how if isinstance(how, RingserveError) else self._finished(turn, how))
        turn.over.set()
        if not turn.is_streamed:
            self._unread[turn.turn_id] = turn
            forget = asyncio.get_running_loop().call_later
            forget(self.settings.attach_timeout, self._unread.pop, turn.turn_id, None)

    def _freed(self, turn: DecodeTurn) -> None:
        if self._room is not None and self.ring.is_serving(turn.reservation.incarnation):
            self._room.freed(turn)

    async def _cut(self, turn: DecodeTurn, how: FinishReason) -> FinishReason | RingserveError:
        """Stop decoding a turn whose answer is complete, and forget what came after it."""
        try:
            if self._batch is not None and self.ring.is_serving(turn.reservation.incarnation):
                async with asyncio.timeout(self.settings.control_timeout):
                    await self._batch.leave(turn)
        except (RingserveError, TimeoutError) as error:
            # As in `_let_go`: it may still be writing.
            self.ring.report_lost(error, turn.reservation.incarnation)
            return Unavailable(f"ring {self.settings.name} could not end turn {turn.turn_id}: {error}")
        turn.cut()
        return how

    async def _let_go(self, turn: DecodeTurn) -> None:
        """After this neither a receiver nor the decode loop writes to the turn's blocks."""
        if turn.sealing is not None:
            turn.sealing.cancel()
        if not self.ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        timeout = self.settings.control_timeout
        try:
            if self._batch is not None:
                async with asyncio.timeout(timeout):
                    await self._batch.leave(turn)
            await gather_all(port.drop_kv(turn.key, timeout) for port in self.ring.ranks)
        except (RingserveError, TimeoutError) as error:
            # Ranks that do not let go would write into blocks of others: the ring must not go on.
            self.ring.report_lost(error, turn.reservation.incarnation)

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

    def _finished(self, turn: DecodeTurn, reason: FinishReason) -> FinishedEvent:
        return FinishedEvent(
            finish_reason=reason,
            migrated_bytes=turn.migrated_bytes,
            migration_seconds=turn.migration_seconds,
            handoff_seconds=turn.handoff_seconds,
        )

    async def fail_all(self, error: RingserveError) -> None:
        """The ring is lost; its ranks write nothing any more, so turns end without asking them."""
        if self._batch is not None:
            self._batch.abandon(error)
            self._batch = None
        self._earlier_preemptions, self._room = self.num_preemptions, None
        for turn in list(self._turns.values()):
            self._end_soon(turn, error)

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        endings = [turn.ending for turn in self._turns.values() if turn.ending is not None]
        if endings:
            await asyncio.wait(endings, timeout=self.settings.control_timeout)
        await super().close()


def _tokens_event(token_id: int, logprobs: TokenLogprobs | None) -> TokensEvent:
    return TokensEvent(token_ids=(token_id,), logprobs=() if logprobs is None else (logprobs,))

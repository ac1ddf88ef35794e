"""The leader of a decode ring: reserves room, seals transfers, decodes turns in one batch, keeps KV between turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from cp_core.layout import level_counts, spread
from orchestration.block_copies import copy_blocks
from orchestration.decode_batch import DecodeBatch
from orchestration.decode_turn import DecodeTurn
from orchestration.group import GroupLeader
from orchestration.handoff import HandoffState
from orchestration.ports import RankFactory, RouterPort
from orchestration.reshard_sends import sends_for
from orchestration.ring import GroupSettings, gather_all, gather_first_error
from orchestration.turn import (
    Admit,
    FinishedEvent,
    GroupRegistration,
    GroupStatus,
    Reservation,
    Reserve,
    SendKv,
    SentKv,
    TokensEvent,
    TurnEvent,
    TurnOutcome,
)
from workers.steps import DecodeEvent, FinishReason, KvExpect, TransferKey

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
        announce: Callable[[GroupRegistration], Awaitable[None]],
    ) -> None:
        super().__init__(settings, factory, announce)
        self._router = router
        self._turns: dict[str, DecodeTurn] = {}
        self._unread: dict[str, DecodeTurn] = {}  # ended before their stream came; for a while
        self._batch: DecodeBatch | None = None

    async def on_ready(self) -> None:
        """A new incarnation of the ring has an empty batch of its own."""
        incarnation = self.ring.incarnation
        batch = DecodeBatch(self.ring.ranks[0], self.settings.max_batch, self.settings.control_timeout, self._on_event)
        self._batch = batch
        self.spawn(self._read(batch, incarnation))
        await super().on_ready()

    async def _read(self, batch: DecodeBatch, incarnation: str) -> None:
        try:
            await batch.read()
        except RingserveError as error:
            self.ring.report_lost(error, incarnation)

    # --- the verbs of DecodeService ----------------------------------------------------------------------------------

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence, set blocks aside for prompt and answer, and make the ranks expect the KV. Idempotent."""
        await self._until_settled(request.sequence_id)
        known = self._turns.get(request.turn_id)
        if known is not None:
            return known.reservation
        self.ring.require_ready()
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
        filled = sequence.shards.extend(coming).held
        growth = level_counts(filled, request.sampling.max_tokens)
        try:
            pool.make_room(sequence, [own + more for own, more in zip(filled, growth, strict=True)])
        except CapacityExceeded:
            pool.settle(request.sequence_id, request.turn_id, kept)
            raise
        reservation = Reservation(
            incarnation=self.ring.incarnation,
            kept_tokens=kept,
            shards=coming,
            kv_endpoints=self.ring.kv_endpoints,
            tp=self.settings.tp,
        )
        key = TransferKey(request.turn_id, request.attempt, request.source_incarnation, self.ring.incarnation)
        return DecodeTurn(request, key, pool, sequence, reservation)

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
        turn.migrated_bytes = sum(report.payload_bytes for report in reports)
        turn.migration_seconds = max(report.seconds for report in reports)
        await self._advance(turn)

    async def admit(self, admit: Admit) -> None:
        """The prefill ring's first token: it goes to the client at once, decoding waits for the seal. Idempotent."""
        turn = self._turns.get(admit.turn_id)
        if turn is None or turn.is_ending or admit.attempt != turn.request.attempt:
            raise NotFound(f"turn {admit.turn_id} is not waiting on decode ring {self.settings.name}")
        if turn.tokens:
            return
        turn.report, turn.first_token_at = admit.report, time.monotonic()
        turn.tokens.append(admit.first_token)
        turn.events.put_nowait(admit.report)
        turn.events.put_nowait(TokensEvent(token_ids=(admit.first_token,)))
        if turn.state is HandoffState.RESERVED:
            turn.state = turn.state.to(HandoffState.STREAMING)
        await self._advance(turn)

    async def _advance(self, turn: DecodeTurn) -> None:
        if turn.state is not HandoffState.SEALED or not turn.tokens or turn.is_ending:
            return
        reason = turn.finish_reason_of(turn.tokens[0])
        if reason is not None:
            self._end_soon(turn, reason)
            return
        turn.state = turn.state.to(HandoffState.ADMITTED)
        assert self._batch is not None, "a sealed turn has a ring"
        await self._batch.join(turn)

    def _on_event(self, turn: DecodeTurn, event: DecodeEvent) -> None:
        if event.token_id is not None:
            if len(turn.tokens) == 1:
                turn.note_first_step()
            turn.tokens.append(event.token_id)
            turn.events.put_nowait(TokensEvent(token_ids=(event.token_id,)))
        if event.finish_reason not in (None, FinishReason.ABORT):
            assert event.finish_reason is not None
            self._end_soon(turn, event.finish_reason)

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
        started = time.monotonic()
        sequence = turn.sequence
        key = TransferKey(
            request.transfer_id, request.attempt, request.source_incarnation, request.destination_incarnation
        )
        sends = sends_for(
            key,
            sequence.shards,
            request.shards,
            request.tokens,
            blocks=[sequence.table(rank) for rank in range(self.settings.num_ranks)],
            kv_endpoints=request.kv_endpoints,
            num_kv_heads=self.ring.model.num_kv_heads,
            source_tp=self.settings.tp,
            destination_tp=request.tp,
        )
        calls = zip(self.ring.ranks, sends, strict=True)
        pull = asyncio.create_task(gather_all(port.send_kv(send, request.deadline_seconds) for port, send in calls))
        turn.pulls.add(pull)
        pull.add_done_callback(turn.pulls.discard)
        reports = await asyncio.shield(pull)
        return SentKv(payload_bytes=sum(report.payload_bytes for report in reports), seconds=time.monotonic() - started)

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

    async def get_status(self) -> GroupStatus:
        return self.status_with(running=self.num_running, waiting=len(self._turns) - self.num_running)

    # --- ends --------------------------------------------------------------------------------------------------------

    def _end_soon(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        """The first call decides how the turn ends."""
        if turn.ending is None:
            turn.ending = self.spawn(self._end(turn, how))

    def _end_if_unclaimed(self, turn: DecodeTurn, error: RingserveError) -> None:
        if not turn.is_streamed:
            self._end_soon(turn, error)

    async def _end(self, turn: DecodeTurn, how: FinishReason | RingserveError) -> None:
        turn.stop_timers()
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
        turn.events.put_nowait(how if isinstance(how, RingserveError) else self._finished(turn, how))
        turn.over.set()
        if not turn.is_streamed:
            self._unread[turn.turn_id] = turn
            forget = asyncio.get_running_loop().call_later
            forget(self.settings.attach_timeout, self._unread.pop, turn.turn_id, None)

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
        for turn in list(self._turns.values()):
            self._end_soon(turn, error)

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        endings = [turn.ending for turn in self._turns.values() if turn.ending is not None]
        if endings:
            await asyncio.wait(endings, timeout=self.settings.control_timeout)
        await super().close()

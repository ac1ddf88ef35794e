"""The leader of a decode ring: reserves room, seals transfers, decodes turns in one batch, keeps KV between turns."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from cp_core.errors import CapacityExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from cp_core.layout.shards import ShardMap, spread
from orchestration.decode.direct_prefill import check_direct, compute_prompt, direct_shards
from orchestration.decode.engine import DecodeEngine
from orchestration.decode.registry import DecodeTurns
from orchestration.decode.turn import DecodeTurn, decode_stretches
from orchestration.protocol.handoff import HandoffState
from orchestration.protocol.kv import SendKv, SentKv
from orchestration.protocol.ports import Peers, RankFactory, RouterPort
from orchestration.protocol.settings import RingSettings
from orchestration.protocol.turns import (
    Admit,
    EndingEvent,
    FinishedEvent,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    RingRegistration,
    ScoredEvent,
    TurnEvent,
)
from orchestration.protocol.views import RingStatus
from orchestration.ring.kv_transfers import copy_blocks, expect, send
from orchestration.ring.leader import RingLeader
from orchestration.tasks import gather_first_error
from workers.protocol.decode_commands import FinishReason
from workers.protocol.prefill_steps import TokenIds
from workers.protocol.transfers import TransferKey

CAUSE_SECONDS = 1.0
"""How long a failed hand-off waits to be told why it failed."""


class DecodeLeader(RingLeader):
    """Owns one decode ring, and takes its turns from their reservation to the batch. `DecodeTurns` ends them."""

    def __init__(
        self,
        settings: RingSettings,
        factory: RankFactory,
        peers: Peers,
        router: RouterPort,
        announce: Callable[[RingRegistration], Awaitable[int]],
    ) -> None:
        super().__init__(settings, factory, peers, announce)
        self._engine = DecodeEngine(self.ring, router, self.spawn, self._no_more_tokens)
        self._turns = DecodeTurns(self.ring, self._engine, router, self.spawn, self._trace)
        self._arrivals = itertools.count()

    async def on_ready(self) -> None:
        self._engine.start()
        await super().on_ready()

    # --- the verbs of RingService ------------------------------------------------------------------------------------

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence, set blocks aside, and make the ranks expect the KV. Idempotent per attempt."""
        await self._until_released(request.kv_id)
        known = self._turns.of_turn(request.turn_id)
        if known is not None:
            if request.attempt > known.request.attempt:
                await self._reserve_again(known, request)
            return known.reservation
        self.ring.require_ready()
        self._engine.require_started()
        limit = self.settings.ranks.max_batch + self.settings.max_waiting
        if len(self._turns) >= limit:
            raise CapacityExceeded(
                f"decode ring {self.settings.name}: {len(self._turns)} turns are under way and at most {limit} are "
                f"allowed; retry later"
            )
        turn = self._pin(request)
        self._turns.add(turn)
        turn.copying = asyncio.create_task(
            copy_blocks(self.ring, turn.pool, turn.sequence, turn.reservation.incarnation)
        )
        try:
            await asyncio.shield(turn.copying)
            if not request.is_direct:
                await expect(self.ring, turn.sequence, turn.key, turn.reservation.shards)
        except RingserveError:
            await self._turns.refuse(turn)
            raise
        self._turns.watch(turn)
        if not request.is_direct:
            turn.sealing = self.spawn(self._seal(turn))
        return turn.reservation

    async def _until_released(self, kv_id: str) -> None:
        """Whoever has the sequence and is done with it is about to settle."""
        await self._turns.until_settled(kv_id)
        await self.kv_moves.until_free(kv_id)

    def _pin(self, request: Reserve) -> DecodeTurn:
        pool = self.ring.pool
        sequence = pool.pin(request.kv_id, request.turn_id, request.match_tokens)
        kept, held = sequence.shards.num_tokens, sequence.shards.held
        if request.is_direct:
            coming = direct_shards(kept, request.num_tokens, held)
        else:
            coming = spread(kept, request.num_tokens - kept, held)
        try:
            if request.is_direct:
                check_direct(self.settings.name, request.num_tokens - kept, self.settings.max_direct_tokens)
            room = self._engine.reserve(sequence, sequence.shards.extend(coming).held, request.sampling.max_tokens)
        except CapacityExceeded:
            pool.settle(request.kv_id, request.turn_id, kept)
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

    def _reservation(self, retained_tokens: int, coming: ShardMap) -> Reservation:
        return Reservation(
            incarnation=self.ring.incarnation,
            retained_tokens=retained_tokens,
            shards=coming,
            kv_endpoints=self.ring.kv_endpoints,
            tp=self.settings.ranks.tp,
        )

    async def _reserve_again(self, turn: DecodeTurn, request: Reserve) -> None:
        """The router follows `resume`: the blocks are there, and KV comes once more, of prompt and answer so far."""
        if turn.is_ending or turn.state is not HandoffState.PREEMPTED or request.num_tokens != turn.kv_tokens:
            raise NotFound(f"turn {turn.turn_id} does not wait to be resumed on decode ring {self.settings.name}")
        self.ring.require_ready(turn.reservation.incarnation)
        turn.request, turn.key = request, self._key(request)
        turn.reservation = self._reservation(0, spread(0, request.num_tokens, turn.sequence.shards.held))
        turn.state = turn.state.to(HandoffState.RESERVED)
        await expect(self.ring, turn.sequence, turn.key, turn.reservation.shards)
        turn.sealing = self.spawn(self._seal(turn))

    async def _seal(self, turn: DecodeTurn) -> None:
        """Wait until every rank has its share whole; the deadline is the turn's own."""
        timeout = turn.request.deadline_seconds
        try:
            reports = await gather_first_error(port.await_kv(turn.key, timeout) for port in self.ring.ranks)
        except RingserveError as error:
            # A sender seldom gives up without a cause: the router, which learns it now, has the first word.
            await asyncio.sleep(CAUSE_SECONDS)
            self._turns.end_soon(turn, Unavailable(f"the KV hand-off to ring {self.settings.name} failed: {error}"))
            return
        turn.state = turn.state.to(HandoffState.SEALED)
        turn.sequence.shards = turn.sequence.shards.extend(turn.reservation.shards)
        turn.note_migration(
            self.settings.name,
            sum(report.payload_bytes for report in reports),
            max(report.seconds for report in reports),
        )
        await self._advance(turn)

    async def prefill(self, request: PrefillTurn) -> PrefillDone:
        """Compute the prompt of a turn that was reserved for it here, and decode on.

        Asking again joins the one under way. Losing the caller does not end it, the turn's own end does.
        """
        turn = self._turns.under_way(request.turn_id)
        if turn is None or not turn.request.is_direct or request.attempt != turn.request.attempt:
            raise NotFound(f"turn {request.turn_id} has no prompt to compute on decode ring {self.settings.name}")
        if turn.prefilling is None:
            turn.prefilling = asyncio.create_task(self._prefill(turn, request.token_ids))
        return await asyncio.shield(turn.prefilling)

    async def _prefill(self, turn: DecodeTurn, token_ids: TokenIds) -> PrefillDone:
        admit = await compute_prompt(self._engine, turn, token_ids)
        turn.note_prompt(self.settings.name, admit.report)
        shards = turn.sequence.shards
        await self.admit(admit)
        return PrefillDone(report=admit.report, shards=shards)

    async def admit(self, admit: Admit) -> None:
        """The prefill ring's first token: it goes to the client at once, decoding waits for the seal. Idempotent."""
        turn = self._turns.under_way(admit.turn_id)
        if turn is None or admit.attempt != turn.request.attempt:
            raise NotFound(f"turn {admit.turn_id} is not waiting on decode ring {self.settings.name}")
        if turn.tokens:
            return  # told again; or of a later attempt, whose last token the client has already
        turn.report, turn.first_token_at = admit.report, time.monotonic()
        turn.events.put_nowait(admit.report)
        if admit.prompt_logprobs:
            turn.events.put_nowait(ScoredEvent(logprobs=admit.prompt_logprobs))
        turn.add_token(admit.first_token, admit.logprobs)
        if turn.state is HandoffState.RESERVED:
            turn.state = turn.state.to(HandoffState.STREAMING)
        await self._advance(turn)

    async def _advance(self, turn: DecodeTurn) -> None:
        if turn.state not in (HandoffState.SEALED, HandoffState.ADMITTED) or not turn.tokens or turn.is_ending:
            return
        if turn.num_finished is not None:
            self._turns.end_soon(turn, turn.finish_reason)
            return
        if turn.state is HandoffState.ADMITTED:
            return
        reason = turn.finish_reason_of(turn.tokens[-1])
        if reason is not None:
            self._no_more_tokens(turn, reason)
            return
        turn.state = turn.state.to(HandoffState.ADMITTED)
        await self._engine.enter(turn)

    def _no_more_tokens(self, turn: DecodeTurn, reason: FinishReason) -> None:
        """The turn is over, unless its reader may find that it was over before."""
        if not turn.request.sampling.ends_by_text:
            self._turns.end_soon(turn, reason)
        elif turn.own_end is None:
            turn.own_end = reason
            turn.events.put_nowait(EndingEvent(finish_reason=reason))

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        """End a turn well after its first `num_tokens` tokens; later ones, and their KV, are discarded.

        The stream tells the end. Idempotent: the first word counts, and a turn that is over stays as it ended. One
        that gave way to another, and is being resumed, ends when it is back.
        """
        turn = self._turns.under_way(turn_id)
        if turn is None:
            return
        turn.finish(num_tokens)
        await self._advance(turn)

    async def stream_turn(self, turn_id: str) -> AsyncGenerator[TurnEvent, None]:
        """The turn's events; closing the iterator early aborts the turn. Raises what ended a failed turn."""
        turn = self._turns.claim(turn_id)
        try:
            while True:
                event = await turn.events.get()
                if isinstance(event, RingserveError):
                    raise event
                yield event
                if isinstance(event, FinishedEvent):
                    return
        finally:
            self._turns.end_soon(turn, TurnCancelled("the client went away"))

    async def send_kv(self, request: SendKv) -> SentKv:
        """Send kept tokens to another ring: a turn's own stay pinned until the ranks have let go of them.

        Losing the caller does not end it. Raises NotFound, Busy, TransferError, Unavailable.
        """
        if not request.turn_id:
            return await super().send_kv(request)
        self.ring.require_ready(request.source_incarnation)
        turn = self._turns.under_way(request.turn_id)
        if turn is None:
            raise NotFound(f"turn {request.turn_id} holds no KV on decode ring {self.settings.name}")
        sending = asyncio.create_task(send(self.ring, turn.sequence, request))
        turn.sends.add(sending)
        sending.add_done_callback(turn.sends.discard)
        return await asyncio.shield(sending)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """End a turn in any state; returns when its blocks are settled. Idempotent."""
        await self._turns.end(turn_id, error)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        """Cut a sequence that the router knows to be idle to its first `retain_tokens` tokens; 0 frees it."""
        await self._until_released(kv_id)
        self.ring.pool.settle(kv_id, turn_id, retain_tokens)

    async def measure(self) -> None:
        """Between two steps: plans ask for this ring's rates where it could compute a prompt itself."""
        await self.ring.measure_between_steps()
        await self.announce()

    def _trace(self, turn: DecodeTurn) -> None:
        if turn.request.trace_parent:
            stretches = decode_stretches(turn, self.settings.name, time.monotonic())
            self.tracer.record(turn.request.trace_parent, stretches)

    @property
    def num_running(self) -> int:
        """Turns in the decode batch."""
        return self._engine.num_running

    @property
    def num_preemptions(self) -> int:
        """How often a turn gave its blocks to an older one."""
        return self._engine.num_preemptions

    @property
    def num_turns(self) -> int:
        return self._turns.num_unfinished

    async def get_status(self) -> RingStatus:
        status = self.status_with(running=self.num_running, waiting=len(self._turns) - self.num_running)
        return replace(status, num_preemptions=self.num_preemptions)

    async def fail_all(self, error: RingserveError) -> None:
        """The ring is lost; its ranks write nothing any more, so turns end without asking them."""
        self._engine.stop(error)
        self._turns.end_all(error)

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        await self._turns.until_over(self.settings.control_timeout)
        await super().close()

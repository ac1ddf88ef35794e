"""Decode ring leader: it reserves blocks, receives KV, decodes turns, and retains their KV.

A turn is *sealed* when its KV has arrived whole. The leader's process runs it; other processes call its verbs.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace

from ringserve.cp_core.errors import CapacityExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from ringserve.cp_core.layout.shards import ShardMap, balanced_layout, spread
from ringserve.orchestration.decode.engine import DecodeEngine
from ringserve.orchestration.decode.registry import DecodeTurns
from ringserve.orchestration.decode.turn import Answer, Attempt, DecodeTurn, DecodeTurnState
from ringserve.orchestration.protocol.inventory import TurnOnRing
from ringserve.orchestration.protocol.ports import Peers, RankFactory, RouterPort
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.protocol.turns import (
    Admit,
    FinishedEvent,
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    ScoredEvent,
    SendKv,
    SentKv,
    TurnEvent,
)
from ringserve.orchestration.ring.kv_transfers import copy_blocks, expect, send
from ringserve.orchestration.ring.leader import Announce, RingLeader
from ringserve.orchestration.tasks import begin_joined, gather_first_error
from ringserve.views import RingInfo
from ringserve.workers.protocol.steps import FinishReason
from ringserve.workers.protocol.transfers import TransferKey

CAUSE_SECONDS = 1.0
"""Seconds from a failed hand-off to the end of its turn. Within them the router may abort the turn with the cause."""


class DecodeLeader(RingLeader):
    """Decode ring owner. It takes turns from their reservation to the batch; `DecodeTurns` ends them."""

    def __init__(
        self,
        settings: RingSettings,
        factory: RankFactory,
        peers: Peers,
        router: RouterPort,
        announce: Announce,
    ) -> None:
        super().__init__(settings, factory, peers, announce)
        self._engine = DecodeEngine(self.ring, router, self.spawn, self._on_last_token, self._on_lost)
        self._turns = DecodeTurns(self.ring, self._engine, router, self.spawn, self._trace)
        self._arrivals = itertools.count()

    async def on_ready(self) -> None:
        """Start the engine of a new incarnation and announce the ring."""
        self._engine.start()
        await super().on_ready()

    # --- the verbs of RingService ------------------------------------------------------------------------------------

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence, reserve blocks, and make the ranks expect the KV. Idempotent per attempt.

        A call that fails or is cancelled leaves nothing reserved.
        """
        await self._until_released(request.kv_id)
        known = self._turns.get(request.turn_id)
        if known is not None:
            if request.attempt > known.request.attempt:
                await self._reserve_again(known, request)
            return known.reservation
        # A later attempt means that this ring had the turn. It has ended since: if it were reserved anew, nobody would
        # end it.
        if request.attempt > 1:
            raise TurnCancelled(f"turn {request.turn_id} has ended on decode ring {self.settings.name}")
        self.ring.require_ready()
        self._engine.require_started()
        self.shares.check_turns(
            request,
            (turn.request for turn in self._turns),
            max_turns=self.settings.ranks.max_batch + self.settings.max_waiting,
            kv_tokens=self.ring.pool.capacity_tokens,
        )
        turn = self._pin(request)
        self._turns.add(turn)
        self._turns.watch(turn)  # before the first await: whatever becomes of the caller, the blocks are released
        copying = copy_blocks(self.ring, turn.pool, turn.sequence, turn.reservation.incarnation)
        turn.tasks.copying = begin_joined(f"the copy of shared blocks for turn {turn.turn_id}", copying)
        try:
            await asyncio.shield(turn.tasks.copying)
            if not request.is_direct:
                await self._expect(turn)
        except BaseException as error:  # cancellation too: if the router is gone, nobody else would end the turn
            ended = turn.error  # if it was aborted or its deadline passed meanwhile; then its end drops the transfer
            await self._turns.refuse(turn)
            if ended is not None and isinstance(error, RingserveError):
                raise ended from error
            raise
        if turn.error is not None:
            await self._turns.refuse(turn)
            raise turn.error
        if request.is_direct:
            turn.tasks.prefilling = begin_joined(f"the prompt of turn {turn.turn_id}", self._prefill(turn))
        else:
            turn.tasks.sealing = self.spawn(self._seal(turn))
        return turn.reservation

    async def _until_released(self, kv_id: str) -> None:
        """Wait until ending turns of the sequence have settled, and until no transfer between rings has it pinned."""
        await self._turns.until_settled(kv_id)
        await self.kv_moves.until_free(kv_id)

    def _pin(self, request: Reserve) -> DecodeTurn:
        pool = self.ring.pool
        sequence = pool.pin(request.kv_id, request.turn_id, request.match_tokens, shares=request.shares)
        retained, held = sequence.shards.num_tokens, sequence.shards.held
        num_new, num_answered = request.num_tokens - retained, max(0, len(request.answer) - 1)
        # A ring that computes the prompt itself stores each token on the rank that computes it.
        direct = request.is_direct
        coming = balanced_layout(retained, num_new, held).shard_map() if direct else spread(retained, num_new, held)
        try:
            if direct:
                self._check_direct(num_new)
            to_come = request.sampling.max_tokens - num_answered
            room = self._engine.reserve(sequence, sequence.shards.extend(coming).held, to_come)
        except CapacityExceeded:
            pool.settle(request.kv_id, request.turn_id, retained)
            raise
        return DecodeTurn(
            self._attempt(request, retained, coming),
            pool,
            sequence,
            arrival=next(self._arrivals),
            prompt_tokens=request.num_tokens - num_answered,
            room=room,
            answer=Answer(tokens=list(request.answer)),
        )

    def _check_direct(self, num_new: int) -> None:
        """Raise CapacityExceeded if a prompt has more new tokens than the ring computes between two decode steps.

        The router chose by what the ring retained earlier; some of that may have been evicted since.
        """
        limit = self.settings.max_direct_tokens
        if num_new > limit:
            raise CapacityExceeded(
                f"decode ring {self.settings.name}: {num_new} tokens of the prompt are not cached and it computes "
                f"{limit} at most"
            )

    def _attempt(self, request: Reserve, retained_tokens: int, coming: ShardMap) -> Attempt:
        """Return an attempt: the ring has the KV of its first `retained_tokens` tokens, the rest comes to `coming`."""
        ring = self.ring
        key = TransferKey(request.turn_id, request.attempt, request.source_incarnation, ring.incarnation)
        reservation = Reservation(
            incarnation=ring.incarnation,
            retained_tokens=retained_tokens,
            shards=coming,
            kv_endpoints=ring.kv_endpoints,
            tp=self.settings.ranks.tp,
        )
        return Attempt(request, key, reservation)

    async def _reserve_again(self, turn: DecodeTurn, request: Reserve) -> None:
        """Begin the new attempt of a turn that resumes: KV of prompt and answer comes to its new blocks."""
        if turn.is_ending or turn.state is not DecodeTurnState.RESUMING or request.num_tokens != turn.kv_tokens:
            raise NotFound(f"turn {turn.turn_id} does not wait to be resumed on decode ring {self.settings.name}")
        self.ring.require_ready(turn.reservation.incarnation)
        turn.attempt = self._attempt(request, 0, spread(0, request.num_tokens, turn.sequence.shards.held))
        turn.to(DecodeTurnState.RESERVED)
        await self._expect(turn)
        turn.tasks.sealing = self.spawn(self._seal(turn))

    async def _expect(self, turn: DecodeTurn) -> None:
        await expect(self.ring, turn.sequence, turn.attempt.key, turn.reservation.shards)

    async def _seal(self, turn: DecodeTurn) -> None:
        """Wait, at most to the turn's deadline, until every rank has its share of the KV; then go on with the turn."""
        timeout, key = turn.request.deadline_seconds, turn.attempt.key
        grammar = turn.request.sampling.grammar
        preparing = self.preparing_grammar(grammar) if grammar else None
        try:
            reports = await gather_first_error(port.await_kv(key, timeout) for port in self.ring.ranks)
        except RingserveError as error:
            # If a sender failed, the router usually learns why by now, and its abort names that reason.
            await asyncio.sleep(CAUSE_SECONDS)
            self._turns.end_soon(turn, Unavailable(f"the KV hand-off to ring {self.settings.name} failed: {error}"))
            return
        if preparing is not None:
            await preparing
        turn.to(DecodeTurnState.SEALED)
        turn.sequence.shards = turn.sequence.shards.extend(turn.reservation.shards)
        payload_bytes, seconds = sum(each.payload_bytes for each in reports), max(each.seconds for each in reports)
        sent = SentKv(payload_bytes=payload_bytes, seconds=seconds)
        turn.times.note_migration(self.settings.name, turn.request.attempt, sent)
        await self._advance(turn)

    async def prefill(self, request: PrefillTurn) -> PrefillDone:
        """Wait for a prompt that the turn's reservation has begun to compute. The turn may have ended since.

        The computation goes on if the caller is gone; only the end of the turn stops it.
        """
        turn = self._turns.find(request.turn_id)
        if turn is None or turn.tasks.prefilling is None or request.attempt != turn.request.attempt:
            raise NotFound(f"turn {request.turn_id} has no prompt to compute on decode ring {self.settings.name}")
        return await asyncio.shield(turn.tasks.prefilling)

    async def _prefill(self, turn: DecodeTurn) -> PrefillDone:
        """Compute the prompt of a turn, and decode on."""
        if grammar := turn.request.sampling.grammar:
            await self.preparing_grammar(grammar)
        admit = await self._engine.compute_prompt(turn)
        turn.times.note_prompt(self.settings.name, turn.request.attempt, admit.report)
        shards = turn.sequence.shards
        await self.admit(admit)
        return PrefillDone(report=admit.report, shards=shards)

    async def admit(self, admit: Admit) -> None:
        """Hand the first token of the prefill to the client. Decoding begins when the KV has arrived whole. Idempotent.

        If the answer began on another ring, the client already has that token.
        """
        turn = self._turns.under_way(admit.turn_id)
        if turn is None or admit.attempt != turn.request.attempt:
            raise NotFound(f"turn {admit.turn_id} is not waiting on decode ring {self.settings.name}")
        if turn.is_prefilled:
            return  # a repeated call, or a later attempt
        turn.is_prefilled = True
        turn.times.first_token_at = time.monotonic()
        turn.opening.append(admit.report)
        if admit.prompt_logprobs:
            turn.opening.append(ScoredEvent(logprobs=admit.prompt_logprobs))
        if not turn.answer.tokens:
            turn.add_token(admit.first_token, admit.logprobs)
        if turn.state is DecodeTurnState.RESERVED:
            turn.to(DecodeTurnState.STREAMING)
        await self._advance(turn)

    async def _advance(self, turn: DecodeTurn) -> None:
        """Admit a sealed turn to the batch, or end a turn whose answer is complete."""
        is_sealed = turn.state is DecodeTurnState.SEALED
        if not (is_sealed or turn.state.is_decoding) or not turn.is_prefilled or turn.is_ending:
            return
        if turn.answer.num_finished is not None:
            self._turns.end_soon(turn, turn.answer.finish_reason)
        elif is_sealed and (reason := turn.reason_to_end()) is not None:
            self._on_last_token(turn, reason)
        elif is_sealed:
            turn.to(DecodeTurnState.ADMITTED)
            await self._engine.enter(turn)

    def _on_last_token(self, turn: DecodeTurn, reason: FinishReason) -> None:
        """End a turn whose answer is complete, unless its reader may still find an earlier end in the text."""
        if not turn.request.sampling.ends_by_text:
            self._turns.end_soon(turn, reason)
        elif turn.answer.own_end is None:
            turn.answer.own_end = reason
            turn.changed.set()

    def _on_lost(self, turn: DecodeTurn, error: RingserveError) -> None:
        self._turns.end_soon(turn, error)

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        """End a turn well after its first `num_tokens` tokens; later tokens and their KV are discarded.

        The turn's stream ends with the last event, as for other turns. Idempotent: the first call counts, and a turn
        that is over stays as it ended. A preempted turn ends when it is resumed.
        """
        turn = self._turns.under_way(turn_id)
        if turn is None:
            return
        turn.finish(num_tokens)
        await self._advance(turn)

    async def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        """Yield the turn's events after its first `after` tokens. Raises the error of a failed turn.

        Tokens that come within `interval` seconds after an event are held back, and come with later tokens in one
        event. Another stream of the turn ends this one, with Busy. A turn whose stream is closed early runs on for the
        orphan timeout, within which another may come.
        """
        reader = self._turns.read(turn_id, after, interval)
        try:
            while True:
                event = await reader.next()
                yield event
                if isinstance(event, FinishedEvent):
                    return
        finally:
            self._turns.leave(reader)

    async def send_kv(self, request: SendKv) -> SentKv:
        """Send retained tokens to another ring. Tokens of a running turn stay pinned until the ranks have sent them.

        The transfer goes on if the caller is gone. Raises NotFound, Busy, TransferError, Unavailable.
        """
        if not request.turn_id:
            return await super().send_kv(request)
        self.ring.require_ready(request.source_incarnation)
        turn = self._turns.under_way(request.turn_id)
        if turn is None:
            raise NotFound(f"turn {request.turn_id} holds no KV on decode ring {self.settings.name}")
        sending = begin_joined(f"a move of KV of turn {turn.turn_id}", send(self.ring, turn.sequence, request))
        turn.tasks.sends[sending] = request.key
        sending.add_done_callback(turn.tasks.sends.pop)
        return await asyncio.shield(sending)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """End a turn in any state; return when its blocks are settled. Idempotent."""
        await self._turns.end(turn_id, error)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        """Cut a sequence that the router knows to be idle to its first `retain_tokens` tokens; 0 frees it."""
        await self._until_released(kv_id)
        self.ring.pool.settle(kv_id, turn_id, retain_tokens)

    async def measure(self, until_quiet: Callable[[], Awaitable[None]]) -> None:
        """Measure the ring's rates between two steps. Plans need them, since the ring may compute prompts itself."""
        await until_quiet()
        await self.ring.measure_between_steps()
        await self.announce()

    def _trace(self, turn: DecodeTurn) -> None:
        if turn.request.trace_parent:
            self.tracer.record(turn.request.trace_parent, turn.spans(self.settings.name, time.monotonic()))

    def turns_here(self) -> tuple[TurnOnRing, ...]:
        """Return the turns that hold KV, and those whose end the router has not heard."""
        return self._turns.inventory()

    @property
    def num_running(self) -> int:
        """Turns in the decode batch."""
        return self._engine.num_running

    @property
    def num_preemptions(self) -> int:
        """Preemptions in all incarnations of the ring."""
        return self._engine.num_preemptions

    @property
    def num_turns(self) -> int:
        """Turns that are not over, and turns that are over and that no stream has begun to read."""
        return self._turns.num_unfinished

    async def get_status(self) -> RingInfo:
        """Return the ring's state, load and preemptions."""
        status = self.status_with(running=self.num_running, waiting=len(self._turns) - self.num_running)
        return replace(status, num_preemptions=self.num_preemptions)

    async def fail_all(self, error: RingserveError) -> None:
        """End every turn with `error`: the ring is lost, and its ranks no longer write."""
        self._engine.stop(error)
        self._turns.end_all(error)

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        await self._turns.until_over(self.settings.control_timeout)
        await super().close()

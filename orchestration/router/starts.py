"""How turns start, or start again: their rings reserve, the answers make the plan, the prefill is set going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

import numpy as np

from cp_core.errors import CapacityExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from orchestration.conversations.move_counts import MoveCounts
from orchestration.placement.cached_kv import PULLED_FROM_OTHER
from orchestration.placement.planner import Planner, PromptOnRings
from orchestration.placement.registry import RegisteredRing
from orchestration.placement.ring_status import withdraw_if_lost
from orchestration.protocol.ports import Peers, RingPort
from orchestration.protocol.turns import (
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reserve,
    ResumeTurn,
    RetainingRing,
    TurnPlan,
)
from orchestration.protocol.views import MoveReason
from orchestration.router.placements import TurnPlacements
from orchestration.router.registry import TurnRegistry
from orchestration.router.turn import RunningTurn
from workers.protocol.prefill_steps import RING_ALGORITHMS, TokenIds

log = logging.getLogger(__name__)


class TurnStarts:
    """Starts turns that `turns` knows, and hands it those that fail. `spawn` runs work in the router's background.

    A turn has one attempt after another, never two at a time: the first by `start`, each later one by `resume`.
    """

    def __init__(
        self,
        peers: Peers,
        planner: Planner,
        placements: TurnPlacements,
        turns: TurnRegistry,
        moves: MoveCounts,
        control_timeout: float,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        self._peers = peers
        self._planner = planner
        self._placements = placements
        self._turns = turns
        self._moves = moves
        self._control_timeout = control_timeout
        self._spawn = spawn

    async def start(self, turn: RunningTurn) -> TurnPlan:
        """Reserve, plan, and set the prefill going. A turn that cannot start is ended, whatever kept it from it.

        Raises CapacityExceeded, Unavailable, or what ended the turn meanwhile.
        """
        try:
            await self._reserve_somewhere(turn)
            if turn.stop_error is not None:
                raise turn.stop_error
            plan = self._placements.explain(turn, self._plan(turn))
        except BaseException as error:
            # Also when the gateway hangs up while we wait: what was reserved must not stay.
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._spawn(self._turns.give_up(turn, reason))
            if turn.stop_error is not None and isinstance(error, RingserveError):
                raise turn.stop_error from None  # whatever else a ring says of a turn that was ended meanwhile
            raise
        turn.prefilling = asyncio.create_task(self._prefill(turn, plan))
        turn.prefilling.add_done_callback(lambda task: self._prefilled(turn, task))
        return plan

    async def resume(self, request: ResumeTurn) -> None:
        """See `Router.resume_turn`."""
        turn = self._turns.of_turn(request.turn_id)
        if turn is None or turn.ending is not None:
            raise NotFound(f"turn {request.turn_id} has ended")
        if request.attempt > turn.attempt:
            turn.attempt = request.attempt
            turn.resuming = asyncio.create_task(self._resume(turn, np.asarray(request.token_ids, dtype=np.int64)))
        assert turn.resuming is not None, f"attempt {request.attempt} of turn {request.turn_id} was begun by no resume"
        await asyncio.shield(turn.resuming)
        assert turn.prefilling is not None, "resumed"
        prefilling = turn.prefilling
        await asyncio.wait([prefilling])  # its end, and what ends a cancelled turn, see to it
        if prefilling.cancelled():
            raise NotFound(f"turn {request.turn_id} has ended")
        if (error := prefilling.exception()) is not None:
            raise (
                error if isinstance(error, RingserveError) else Unavailable("the prefill failed for an internal reason")
            )

    async def _resume(self, turn: RunningTurn, decoded: TokenIds) -> None:
        assert turn.prefilling is not None, "a turn that was decoded was prefilled"
        # Of the attempt before: the decode ring had all KV, or gave it up, and its sender may not know yet.
        await asyncio.wait([turn.prefilling], timeout=self._control_timeout)
        if not turn.prefilling.done():
            raise Unavailable(f"ring {turn.choice.computing.name} still works on turn {turn.turn_id}")
        turn.decoded = decoded
        if turn.prefill is None:
            self._placements.take_prefill_ring(turn)
        else:
            port = self._peers.leader("prefill", turn.prefill.registration.endpoint)
            await port.settle(turn.kv_id, turn.turn_id, len(turn.token_ids) - 1)
        await self._reserve(turn)
        if turn.ending is not None:
            raise NotFound(f"turn {turn.turn_id} has ended")
        turn.prefilling = asyncio.create_task(self._prefill(turn, self._plan(turn)))

    async def _reserve_somewhere(self, turn: RunningTurn) -> None:
        """Reserve on the rings that were chosen or, where they have no room, on the next ones."""
        while True:
            try:
                return await self._reserve(turn)
            except (CapacityExceeded, Unavailable) as refusal:
                await self._placements.try_elsewhere(turn, refusal)

    async def _reserve(self, turn: RunningTurn) -> None:
        sampling, prefill = turn.request.sampling, turn.prefill
        request = Reserve(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            kv_id=turn.kv_id,
            match_tokens=0,
            num_tokens=len(turn.token_ids),
            deadline_seconds=turn.request.deadline_seconds,
            source_incarnation=prefill.registration.incarnation if prefill else "",
            is_direct=prefill is None,
            sampling=sampling,
            penalized_ids=tuple(np.unique(turn.prompt).tolist()) if sampling.looks_at_prompt else (),
            priority=turn.request.priority,
            request_id=turn.request.request_id,
            trace_parent=turn.request.trace_parent,
        )
        # A turn that its decode ring computes fetches nothing. Of a later attempt the rings hold its own tokens alone.
        asks_left = turn.attempt == 1 and prefill is not None
        left = self._placements.left_rings(turn) if asks_left else []
        asking = asyncio.create_task(self._placements.ask_left(turn, left)) if left else None
        try:
            calls = (
                self._port(ring).reserve(replace(request, match_tokens=turn.match_to_reserve(ring)))
                for ring in turn.rings
            )
            answers = await asyncio.gather(*calls, return_exceptions=True)
            turn.left = [] if asking is None else await asking
        finally:
            if asking is not None:
                asking.cancel()
        for ring, answer in zip(turn.rings, answers, strict=True):
            if isinstance(answer, Unavailable):
                ring.is_ready = False
            # One that cannot compute the prompt itself may have room for KV that comes from a prefill ring.
            if isinstance(answer, Unavailable) or (isinstance(answer, CapacityExceeded) and not request.is_direct):
                turn.refused.append(ring)
        *on_prefill, turn.on_decode = (None if isinstance(each, BaseException) else each for each in answers)
        turn.on_prefill = on_prefill[0] if on_prefill else None
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        log.info(
            "turn %s of request %s is reserved on %s",
            turn.turn_id,
            request.request_id,
            " and ".join(ring.name for ring in turn.rings),
            extra=request.log_fields,
        )
        if prefill and turn.on_prefill and turn.on_prefill.incarnation != request.source_incarnation:
            turn.refused.append(prefill)
            raise Unavailable(f"ring {prefill.name} was rebuilt just now; retry")

    def _plan(self, turn: RunningTurn) -> TurnPlan:
        assert turn.on_decode, "the decode ring has answered"
        asked, prefill = turn.request.algorithm, turn.choice.prefill
        is_direct = turn.prefill is None
        assert is_direct or turn.on_prefill, "both rings have answered"
        prompt = PromptOnRings(
            num_tokens=len(turn.token_ids),
            retained_on_prefill=turn.on_prefill.retained_tokens
            if turn.on_prefill
            else turn.wanted.retained_on(prefill),
            retained_on_decode=turn.on_decode.retained_tokens,
            prefill=prefill.registration,
            decode=turn.decode.registration,
            left=turn.left,
        )
        if is_direct:
            return self._planner.plan_direct(prompt, mode=turn.mode, algorithm=asked)
        # A turn that its decode ring computed as asked is resumed by a prefill ring, in its own way.
        algorithm = asked if asked in RING_ALGORITHMS else None
        return self._planner.plan(prompt, mode=turn.mode, algorithm=algorithm)

    async def _prefill(self, turn: RunningTurn, plan: TurnPlan) -> PrefillDone:
        assert turn.on_decode, "the decode ring has answered"
        turn.pulled_from = _retaining_ring(turn, plan)
        request = PrefillTurn(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            kv_id=turn.kv_id,
            token_ids=turn.token_ids,
            cached_tokens=plan.cached_tokens,
            chunks=plan.chunks,
            sampling=turn.request.sampling,
            deadline_seconds=turn.request.deadline_seconds,
            decode_endpoint=turn.decode.registration.endpoint,
            destination=turn.on_decode,
            pulled_from=turn.pulled_from,
        )
        turn.is_on_prefill_ring = turn.prefill is not None
        return await self._port(turn.choice.computing).prefill(request)

    def _prefilled(self, turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
        """A failed prefill ends the turn where its client waits: on the decode ring's stream."""
        turn.placed.end_prefill()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._note_report(turn, task.result().report)
        if error is None or turn.ending is not None:
            return
        if not isinstance(error, RingserveError):
            log.error("the prefill of turn %s failed", turn.turn_id, exc_info=error)
            error = Unavailable("the prefill failed for an internal reason; retry")
        if isinstance(error, Unavailable):
            # Or was it the decode ring that could not be reached?
            self._spawn(withdraw_if_lost(turn.choice.computing, self._peers))
        self._spawn(self._turns.abort(turn, error))

    def _note_report(self, turn: RunningTurn, report: PrefillReport) -> None:
        self._planner.note_prefill(turn.choice.computing.registration, report)
        if turn.pulled_from is None:
            return
        if report.lost_tokens:
            self._moves.failed(turn.pulled_from.role, MoveReason.TURN)
        else:
            self._moves.moved(turn.pulled_from.role, MoveReason.TURN, report.pulled_bytes, report.pull_seconds)

    def _port(self, ring: RegisteredRing) -> RingPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)


def _retaining_ring(turn: RunningTurn, plan: TurnPlan) -> RetainingRing | None:
    """Where the plan fetches cached KV from, unless that is the turn's decode ring."""
    names = [source.ring for source in plan.cached_sources if source.source == PULLED_FROM_OTHER]
    if not names:
        return None
    ring = next(kept.ring for kept in turn.left if kept.ring.name == names[0])
    return RetainingRing(role=ring.role, ring=ring.name, endpoint=ring.endpoint, incarnation=ring.incarnation)

"""How turns start, or start again: both rings reserve, their answers make the plan, the prefill is set going."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace

import numpy as np

from cp_core.errors import CapacityExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from orchestration.cached_kv import PULLED_FROM_OTHER
from orchestration.group_status import withdraw_if_lost
from orchestration.move_counts import MoveCounts
from orchestration.planner import Planner, PromptOnRings
from orchestration.ports import DecodePort, Peers, PrefillPort
from orchestration.running_turn import RunningTurn
from orchestration.turn import KeepingRing, Plan, PrefillDone, PrefillReport, PrefillTurn, Reserve, ResumeTurn
from orchestration.turn_ends import TurnEnds
from orchestration.turn_placements import TurnPlacements
from orchestration.views import MoveReason
from workers.steps import TokenIds

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
        turns: TurnEnds,
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

    async def start(self, turn: RunningTurn) -> Plan:
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
            raise Unavailable(f"prefill ring {turn.prefill.name} still works on turn {turn.turn_id}")
        turn.decoded = decoded
        await self._prefill_port(turn).settle(turn.sequence_id, turn.turn_id, len(turn.token_ids) - 1)
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
        sampling = turn.request.sampling
        num_tokens = len(turn.token_ids)
        request = Reserve(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            sequence_id=turn.sequence_id,
            match_tokens=0,
            num_tokens=num_tokens,
            deadline_seconds=turn.request.deadline_seconds,
            source_incarnation=turn.prefill.registration.incarnation,
            sampling=sampling,
            penalized_ids=tuple(np.unique(turn.prompt).tolist()) if sampling.looks_at_prompt else (),
            priority=turn.request.priority,
            request_id=turn.request.request_id,
            trace_parent=turn.request.trace_parent,
        )
        rings = (turn.prefill, turn.decode)
        # Of a later attempt the rings hold nothing but the turn's own tokens.
        matches = [turn.match_on(ring) if turn.attempt == 1 else num_tokens - 1 for ring in rings]
        on_prefill, on_decode = (replace(request, match_tokens=match) for match in matches)
        left = asyncio.create_task(self._placements.ask_left(turn)) if turn.attempt == 1 else None
        try:
            answers = await asyncio.gather(
                self._prefill_port(turn).reserve(on_prefill),
                self._decode_port(turn).reserve(on_decode),
                return_exceptions=True,
            )
            turn.left = [] if left is None else await left
        finally:
            if left is not None:
                left.cancel()
        for group, answer in zip(rings, answers, strict=True):
            if isinstance(answer, Unavailable):
                group.is_ready = False
            if isinstance(answer, Unavailable | CapacityExceeded):
                turn.refused.append(group)
        turn.on_prefill, turn.on_decode = (None if isinstance(each, BaseException) else each for each in answers)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        log.info(
            "turn %s of request %s is reserved on %s and %s",
            turn.turn_id,
            request.request_id,
            turn.prefill.name,
            turn.decode.name,
            extra=request.log_fields,
        )
        if turn.on_prefill.incarnation != request.source_incarnation:  # type: ignore[union-attr]
            turn.refused.append(turn.prefill)
            raise Unavailable(f"ring {turn.prefill.name} was rebuilt just now; retry")

    def _plan(self, turn: RunningTurn) -> Plan:
        assert turn.on_prefill and turn.on_decode, "both rings have answered"
        prompt = PromptOnRings(
            num_tokens=len(turn.token_ids),
            kept_on_prefill=turn.on_prefill.kept_tokens,
            kept_on_decode=turn.on_decode.kept_tokens,
            prefill=turn.prefill.registration,
            decode=turn.decode.registration,
            left=turn.left,
        )
        return self._planner.plan(prompt, mode=turn.mode, algorithm=turn.request.algorithm)

    async def _prefill(self, turn: RunningTurn, plan: Plan) -> PrefillDone:
        assert turn.on_decode, "the decode ring has answered"
        turn.pulled_from = _keeping_ring(turn, plan)
        request = PrefillTurn(
            turn_id=turn.turn_id,
            attempt=turn.attempt,
            sequence_id=turn.sequence_id,
            token_ids=turn.token_ids,
            cached_tokens=plan.cached_tokens,
            chunks=plan.chunks,
            sampling=turn.request.sampling,
            deadline_seconds=turn.request.deadline_seconds,
            decode_endpoint=turn.decode.registration.endpoint,
            destination=turn.on_decode,
            pulled_from=turn.pulled_from,
        )
        return await self._prefill_port(turn).prefill(request)

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
            self._spawn(withdraw_if_lost(turn.prefill, self._peers))
        self._spawn(self._turns.abort(turn, error))

    def _note_report(self, turn: RunningTurn, report: PrefillReport) -> None:
        self._planner.note_prefill(turn.prefill.registration, report)
        if turn.pulled_from is None:
            return
        if report.lost_tokens:
            self._moves.failed(turn.pulled_from.role, MoveReason.TURN)
        else:
            self._moves.moved(turn.pulled_from.role, MoveReason.TURN, report.pulled_bytes, report.pull_seconds)

    def _prefill_port(self, turn: RunningTurn) -> PrefillPort:
        return self._peers.prefill(turn.prefill.registration.endpoint)

    def _decode_port(self, turn: RunningTurn) -> DecodePort:
        return self._peers.decode(turn.decode.registration.endpoint)


def _keeping_ring(turn: RunningTurn, plan: Plan) -> KeepingRing | None:
    """Where the plan fetches cached KV from, unless that is the turn's decode ring."""
    names = [source.ring for source in plan.cached_sources if source.source == PULLED_FROM_OTHER]
    if not names:
        return None
    ring = next(kept.ring for kept in turn.left if kept.ring.name == names[0])
    return KeepingRing(role=ring.role, ring=ring.name, endpoint=ring.endpoint, incarnation=ring.incarnation)

"""Attempts of a turn: plan, prefill, and the resumption of a turn that was preempted."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from ringserve.cp_core.errors import NotFound, RingserveError, TurnCancelled, Unavailable
from ringserve.orchestration.conversations.mover import MoveCounts
from ringserve.orchestration.placement.planner import PULLED_FROM_OTHER, Planner, PromptOnRings
from ringserve.orchestration.placement.registry import withdraw_if_lost
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import PrefillDone, PrefillReport, PrefillTurn, ResumeTurn, RetainingRing
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.orchestration.router.registry import TurnRegistry
from ringserve.orchestration.router.reservations import TurnReservations, explain
from ringserve.orchestration.router.turn import RunningTurn, TurnState, note_computed
from ringserve.orchestration.tasks import TaskSet, begin_joined
from ringserve.workers.protocol.prefill_steps import RING_ALGORITHMS, TokenIds

log = logging.getLogger(__name__)


class TurnAttempts:
    """Attempts of running turns. A turn has one after another, never two at a time: `start`, then each `resume`."""

    def __init__(
        self,
        peers: Peers,
        planner: Planner,
        reservations: TurnReservations,
        turns: TurnRegistry,
        moves: MoveCounts,
        tasks: TaskSet,
        control_timeout: float,
    ) -> None:
        self._peers = peers
        self._planner = planner
        self._reservations = reservations
        self._turns = turns
        self._moves = moves
        self._tasks = tasks
        self._control_timeout = control_timeout

    async def start(self, turn: RunningTurn) -> TurnPlan:
        """Reserve, plan and start the prefill. A turn that cannot start is ended, whatever the error.

        Raises CapacityExceeded, Unavailable, or the error that ended the turn meanwhile.
        """
        try:
            return await self.try_start(turn)
        except BaseException as error:
            # Also when the gateway hangs up while the rings reserve: no reservation must stay.
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._tasks.spawn(self._turns.drop(turn, reason))
            if turn.stop_error is not None and isinstance(error, RingserveError):
                raise turn.stop_error from None  # whatever else a ring says of a turn that was ended meanwhile
            raise

    async def try_start(self, turn: RunningTurn) -> TurnPlan:
        """Reserve, plan and start the prefill. Where that fails, the caller ends the turn or tries again."""
        try:
            await self._reservations.reserve_somewhere(turn)
        finally:
            if turn.is_over and turn.prefill is not None:  # the turn's end found nothing to release on that ring
                retain = turn.retained_on_prefill
                release = self._reservations.leave_prefill(turn.kv_id, turn.turn_id, turn.prefill, retain)
                self._tasks.spawn(release)
        if turn.stop_error is not None:
            raise turn.stop_error
        if turn.is_over:
            raise Unavailable(f"ring {turn.decode.name} ended the turn before it began; retry")
        turn.plan = plan = explain(turn, self._plan(turn))
        turn.load_share.correct(plan.predicted_prefill_seconds)
        self._start_prefill(turn, plan).add_done_callback(lambda task: self._on_first_prefill(turn, task))
        return plan

    def rejoin(self, turn: RunningTurn, *, is_joinable: bool) -> None:
        """Go on with a turn of an earlier router, whose prompt is being computed, or was: it is not joinable then."""
        turn.to(TurnState.PREFILLING)
        turn.is_on_prefill_ring = turn.prefill is not None
        turn.prefilling = asyncio.create_task(self._rejoin(turn, is_joinable))
        turn.prefilling.add_done_callback(lambda task: _note_computed(turn, task))
        if is_joinable:
            turn.prefilling.add_done_callback(lambda task: self._on_first_prefill(turn, task))
        else:
            turn.load_share.end_prefill()
            turn.to(TurnState.DECODING)

    async def _rejoin(self, turn: RunningTurn, is_joinable: bool) -> PrefillDone:
        computing = turn.choice.computing
        if not is_joinable:
            raise Unavailable(f"ring {computing.name} no longer has the KV of {turn.kv_id}")
        return await self._peers.leader(computing.role, computing.registration.endpoint).prefill(_joined(turn))

    async def resume(self, request: ResumeTurn) -> None:
        """Make the KV of a turn again. See `Router.resume_turn`."""
        turn = self._turns.of_turn(request.turn_id)
        if turn is None or turn.is_over or turn.state is TurnState.LOST:  # a lost one is begun again under another id
            raise NotFound(f"turn {request.turn_id} has ended")
        if request.attempt > turn.attempt:
            turn.to(TurnState.RESUMING)
            turn.attempt = request.attempt
            resuming = self._resume(turn, np.asarray(request.token_ids, dtype=np.int64))
            turn.resuming = begin_joined(f"the resumption of turn {turn.turn_id}", resuming)
        assert turn.resuming is not None, f"attempt {request.attempt} of turn {request.turn_id} was begun by no resume"
        try:
            await asyncio.shield(turn.resuming)
        except NotFound as error:
            raise self._not_resumed(turn, error) from None
        assert turn.prefilling is not None, "resumed"
        prefilling = turn.prefilling
        await asyncio.wait([prefilling])  # the prefill's own end, or the end of a cancelled turn, ends it
        if prefilling.cancelled():
            raise NotFound(f"turn {request.turn_id} has ended")
        failure = prefilling.exception()
        if isinstance(failure, NotFound):
            raise self._not_resumed(turn, failure)
        if isinstance(failure, RingserveError):
            raise failure
        if failure is not None:
            raise Unavailable("the prefill failed for an internal reason")

    def _not_resumed(self, turn: RunningTurn, error: NotFound) -> RingserveError:
        """Return what a ring's NotFound means to the decode ring: the router alone says that a turn has ended."""
        has_ended = turn.is_over or turn.state is TurnState.LOST
        return error if has_ended else Unavailable(str(error))

    async def _resume(self, turn: RunningTurn, decoded: TokenIds) -> None:
        assert turn.prefilling is not None, "a turn that was decoded was prefilled"
        # The attempt before: the decode ring had all KV, or aborted it, and the sender may not know yet.
        await asyncio.wait([turn.prefilling], timeout=self._control_timeout)
        if not turn.prefilling.done():
            raise Unavailable(f"ring {turn.choice.computing.name} still works on turn {turn.turn_id}")
        _require_resuming(turn)
        turn.decoded = decoded
        if turn.prefill is None:
            self._reservations.take_prefill_ring(turn)
        else:
            port = self._peers.leader("prefill", turn.prefill.registration.endpoint)
            await turn.prefill.guarded(port.settle(turn.kv_id, turn.turn_id, len(turn.token_ids) - 1))
            _require_resuming(turn)  # it may have another id since, under which nobody would release this reservation
        await self._reservations.reserve(turn)
        _require_resuming(turn)
        self._start_prefill(turn, self._plan(turn))

    def _start_prefill(self, turn: RunningTurn, plan: TurnPlan) -> asyncio.Task[PrefillDone]:
        turn.to(TurnState.PREFILLING)
        turn.prefilling = asyncio.create_task(self._prefill(turn, plan))
        turn.prefilling.add_done_callback(lambda task: _note_computed(turn, task))
        return turn.prefilling

    def _plan(self, turn: RunningTurn) -> TurnPlan:
        assert turn.on_decode, "the decode ring has answered"
        asked, prefill = turn.algorithm, turn.choice.prefill
        is_direct, on_prefill = turn.prefill is None, turn.on_prefill
        assert is_direct or on_prefill, "both rings have answered"
        prompt = PromptOnRings(
            num_tokens=len(turn.token_ids),
            retained_on_prefill=on_prefill.retained_tokens if on_prefill else turn.wanted.retained_on(prefill),
            retained_on_decode=turn.on_decode.retained_tokens,
            prefill=prefill.registration,
            decode=turn.decode.registration,
            left=turn.left,
        )
        if turn.sparse is not None:
            return self._planner.plan_sparse(prompt, turn.sparse, mode=turn.mode)
        if is_direct:
            return self._planner.plan_direct(prompt, mode=turn.mode, algorithm=asked)
        # A turn that its decode ring computed as asked is resumed by a prefill ring, which chooses the algorithm.
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
            sparsity=turn.sparsity,
        )
        turn.is_on_prefill_ring = turn.prefill is not None
        computing = turn.choice.computing
        port = self._peers.leader(computing.role, computing.registration.endpoint)
        return await computing.guarded(port.prefill(request))

    def _on_first_prefill(self, turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
        """Learn from the first prefill. A failed one ends the turn where its client waits: on the decode stream."""
        if turn.prefilling is task:
            turn.load_share.end_prefill()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._note_report(turn, task.result().report)
        if error is None or turn.is_over or turn.prefilling is not task:
            return
        if not isinstance(error, RingserveError):
            log.error("the prefill of turn %s failed", turn.turn_id, exc_info=error)
            error = Unavailable("the prefill failed for an internal reason; retry")
        if isinstance(error, Unavailable):
            # It may be the decode ring that could not be reached, so the ring is asked.
            self._tasks.spawn(withdraw_if_lost(turn.choice.computing, self._peers))
        self._tasks.spawn(self._turns.fail(turn, error))

    def _note_report(self, turn: RunningTurn, report: PrefillReport) -> None:
        if turn.sparse is None:  # corrections are of exact turns
            self._planner.note_prefill(turn.choice.computing.registration, report)
        if turn.pulled_from is None:
            return
        if report.lost_tokens:
            self._moves.failed(turn.pulled_from.role, MoveReason.TURN)
        else:
            self._moves.moved(turn.pulled_from.role, MoveReason.TURN, report.pulled_bytes, report.pull_seconds)


def _require_resuming(turn: RunningTurn) -> None:
    """Raise NotFound where the turn has ended meanwhile, or has lost a ring and is begun again under another id."""
    if turn.state is not TurnState.RESUMING:
        raise NotFound(f"turn {turn.turn_id} has ended")


def _note_computed(turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
    is_computed = not task.cancelled() and task.exception() is None
    if is_computed and turn.state is TurnState.PREFILLING and turn.prefilling is task:
        turn.to(TurnState.DECODING)
        note_computed(turn, task.result())


def _retaining_ring(turn: RunningTurn, plan: TurnPlan) -> RetainingRing | None:
    """Return the ring that the plan pulls cached KV from, unless that is the turn's decode ring."""
    names = [source.ring for source in plan.cached_sources if source.source == PULLED_FROM_OTHER]
    if not names:
        return None
    ring = next(prefix.ring for prefix in turn.left if prefix.ring.name == names[0])
    return RetainingRing(
        role=ring.role,
        ring=ring.name,
        endpoint=ring.endpoint,
        incarnation=ring.incarnation,
        kv_id=turn.wanted.shared.get(ring.role, turn.kv_id),
    )


def _joined(turn: RunningTurn) -> PrefillTurn:
    """Return the request that joins a prefill under way: its ring knows the rest."""
    assert turn.on_decode is not None, "an adopted turn is on its decode ring"
    return PrefillTurn(
        turn_id=turn.turn_id,
        attempt=turn.attempt,
        kv_id=turn.kv_id,
        token_ids=turn.token_ids[:0],
        cached_tokens=0,
        chunks=(),
        sampling=turn.request.sampling,
        deadline_seconds=turn.request.deadline_seconds,
        decode_endpoint=turn.decode.registration.endpoint,
        destination=turn.on_decode,
    )

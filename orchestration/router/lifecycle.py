"""Life of a running turn until its end: reservations on its rings, its plan, its prefill, and its resumptions.

The router and its recovery of turns call it. If a ring refuses a turn, the turn goes to the next best rings.
`TurnRegistry` has the ids of the turns, and ends them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringserve.cp_core.errors import CapacityExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from ringserve.orchestration.conversations.mover import MoveCounts
from ringserve.orchestration.conversations.prefixes import PromptPrefixes
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import PULLED_FROM_OTHER, Planner, PromptOnRings, RetainedPrefix
from ringserve.orchestration.placement.registry import RegisteredRing, withdraw_if_lost
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.ports import Peers, PrefillPort
from ringserve.orchestration.protocol.turns import (
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reserve,
    ResumeTurn,
    RetainingRing,
)
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.orchestration.router.registry import RunningTurn, TurnRegistry, TurnState, note_computed
from ringserve.orchestration.tasks import TaskSet, begin_joined
from ringserve.workers.protocol.steps import DRAFT_TEXT_TOKENS, RING_ALGORITHMS, Algorithm, TokenIds

log = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Most refusals by rings after which a turn goes to other rings; one more is the client's error."""
ASK_SECONDS = 2.0
"""Seconds that a ring that a conversation leaves has to answer how much of the conversation's KV it retains."""


class TurnLifecycle:
    """Reservations, plans and prefills of running turns. It writes the turns' `attempt`.

    A turn has one attempt after another, never two at a time: `start`, then each `resume`.
    """

    def __init__(
        self,
        peers: Peers,
        planner: Planner,
        placer: RingPlacer,
        turns: TurnRegistry,
        moves: MoveCounts,
        tasks: TaskSet,
        prefixes: PromptPrefixes | None,
        control_timeout: float,
    ) -> None:
        self._peers = peers
        self._planner = planner
        self._placer = placer
        self._turns = turns
        self._moves = moves
        self._tasks = tasks
        self._prefixes = prefixes
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
                raise turn.stop_error from None  # not what a ring says of a turn that was ended meanwhile
            raise

    async def try_start(self, turn: RunningTurn) -> TurnPlan:
        """Reserve, plan and start the prefill. If that fails, the caller ends the turn or tries again."""
        try:
            await self._reserve_somewhere(turn)
        finally:
            # A turn that ended before it had this reservation has not released it.
            if turn.is_over and turn.prefill is not None:
                retain = turn.retained_on_prefill
                release = self._leave_prefill(turn.kv_id, turn.turn_id, turn.prefill, retain)
                self._tasks.spawn(release)
        if turn.stop_error is not None:
            raise turn.stop_error
        if turn.is_over:
            raise Unavailable(f"ring {turn.decode.name} ended the turn before it began; retry")
        turn.attempt.plan = plan = _with_remarks(turn, self._plan(turn))
        turn.attempt.load_share.correct(plan.predicted_prefill_seconds)
        self._start_prefill(turn, plan).add_done_callback(lambda task: self._on_first_prefill(turn, task))
        return plan

    # --- reservations ------------------------------------------------------------------------------------------------

    async def _reserve_somewhere(self, turn: RunningTurn) -> None:
        """Reserve on the chosen rings or, if they have no room, on the next best ones."""
        while True:
            noting = self._turns.note_begun(turn)  # while the rings reserve
            try:
                await self._reserve(turn)
            except (CapacityExceeded, Unavailable) as refusal:
                await self._try_elsewhere(turn, refusal)
            else:
                return await noting

    async def _reserve(self, turn: RunningTurn) -> None:
        """Reserve on the turn's rings. Meanwhile ask rings that its conversation leaves how much of its KV they retain.

        Rings that refused are added to `turn.attempt.refused`. Raises CapacityExceeded, Unavailable.
        """
        if self._prefixes is not None and turn.attempt.wanted.shared:
            turn.attempt.wanted = self._prefixes.agreeing(turn.attempt.wanted, turn.admitted.prompt)
        request = _reserve_request(turn)
        # If the decode ring computes the prompt, no KV is pulled. A later attempt uses KV of its own rings alone.
        asks_left = turn.attempt.number == 1 and turn.prefill is not None
        left = self._left_rings(turn) if asks_left else []
        asking = asyncio.create_task(self._ask_left(turn, left)) if left else None
        try:
            calls = (
                ring.guarded(
                    self._port(ring).reserve(
                        replace(
                            request,
                            match_tokens=turn.match_to_reserve(ring),
                            shares=turn.shares_on(ring),
                            is_spare=turn.is_spare_on(ring),
                        )
                    )
                )
                for ring in turn.rings
            )
            answers = await asyncio.gather(*calls, return_exceptions=True)
            turn.attempt.left = [] if asking is None else await asking
        finally:
            if asking is not None:
                asking.cancel()
        for ring, answer in zip(turn.rings, answers, strict=True):
            if isinstance(answer, Unavailable):
                ring.is_ready = False
            # A decode ring that cannot compute the prompt may have room for KV that comes from a prefill ring.
            if isinstance(answer, Unavailable) or (isinstance(answer, CapacityExceeded) and not request.is_direct):
                turn.attempt.refused.append(ring)
        *on_prefill, turn.attempt.on_decode = (None if isinstance(each, BaseException) else each for each in answers)
        turn.attempt.on_prefill = on_prefill[0] if on_prefill else None
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        self._note_shared(turn)
        names = " and ".join(ring.name for ring in turn.rings)
        log.info(
            "turn %s of request %s is reserved on %s",
            turn.turn_id,
            request.request_id,
            names,
            extra=request.log_fields,
        )
        prefill = turn.prefill
        if prefill and turn.attempt.on_prefill and turn.attempt.on_prefill.incarnation != request.source_incarnation:
            turn.attempt.refused.append(prefill)
            raise Unavailable(f"ring {prefill.name} was rebuilt just now; retry")

    def _note_shared(self, turn: RunningTurn) -> None:
        """Note if rings have evicted KV that the turn was to share."""
        for ring, reservation in ((turn.prefill, turn.attempt.on_prefill), (turn.decode, turn.attempt.on_decode)):
            if ring is None or reservation is None or not (kv_id := turn.shares_on(ring)) or self._prefixes is None:
                continue
            if reservation.retained_tokens < turn.match_to_reserve(ring):
                self._prefixes.note_retained(kv_id, ring.role, reservation.incarnation, reservation.retained_tokens)

    async def _try_elsewhere(self, turn: RunningTurn, refusal: RingserveError) -> None:
        """Move a refused turn to the next best rings, and release its reservations on the previous ones.

        If its decode ring could not compute the prompt, a prefill ring is to do so. Raises `refusal` if no other ring
        is left, if more than MAX_REFUSALS have refused, if the turn has ended or is to end, or if the client asked for
        its decode ring.
        """
        if len(turn.attempt.refused) > MAX_REFUSALS or turn.stop_error is not None or turn.is_over:
            raise refusal
        if turn.attempt.choice.is_direct:
            if turn.attempt.wanted.asks_for_direct:
                raise refusal
            turn.attempt.wanted = replace(turn.attempt.wanted, refused_direct=turn.decode.name)
        wanted = turn.attempt.wanted
        try:
            choice = self._placer.choose(wanted, turn.attempt.refused)
        except Unavailable:
            raise refusal from None
        need = wanted.num_tokens + wanted.answer_tokens
        if any(need > ring.registration.capacity_tokens for ring in (choice.prefill, choice.decode)):
            raise refusal
        log.info("turn %s goes to rings %s and %s: %s", turn.turn_id, choice.prefill.name, choice.decode.name, refusal)
        before_prefill, before_decode, retained = turn.prefill, turn.decode, turn.retained_on_prefill
        had_prefill, had_decode = turn.attempt.on_prefill is not None, turn.attempt.on_decode is not None
        kv_id = turn.kv_id  # without a conversation it is the turn's id, which `move` changes
        turn_id = self._turns.move(turn, choice, self._placer.place(wanted, choice))
        # Reserved blocks must be free before the turn reserves again. Rings that did not reserve are told too, but not
        # waited for. `shield`: a client that hangs up does not cancel the release.
        leaving = [(self._tasks.spawn(self._leave_decode(turn_id, before_decode)), had_decode)]
        if before_prefill is not None:
            work = self._leave_prefill(kv_id, turn_id, before_prefill, retained)
            leaving.append((self._tasks.spawn(work), had_prefill))
        await asyncio.shield(asyncio.gather(*(task for task, had in leaving if had)))

    async def _leave_prefill(self, kv_id: str, turn_id: str, ring: RegisteredRing, retain: int) -> None:
        """Release a turn's reservation on a prefill ring, as far as the ring can be told."""
        try:
            await ring.guarded(self._port(ring).settle(kv_id, turn_id, retain))
        except RingserveError as error:
            log.info("prefill ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    async def _leave_decode(self, turn_id: str, ring: RegisteredRing) -> None:
        try:
            moved = TurnCancelled("the turn went to another ring")
            await ring.guarded(self._port(ring).abort_turn(turn_id, moved))
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    def _port(self, ring: RegisteredRing) -> PrefillPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)

    def _left_rings(self, turn: RunningTurn) -> list[RegisteredRing]:
        """Return the rings that the conversation leaves and that may retain its KV."""
        return [ring for ring in self._placer.own_rings(turn.attempt.wanted) if ring not in (turn.prefill, turn.decode)]

    async def _ask_left(self, turn: RunningTurn, rings: Sequence[RegisteredRing]) -> list[RetainedPrefix]:
        """Ask `rings` how much of the conversation they retain. A ring silent for ASK_SECONDS counts as empty."""
        answers = await asyncio.gather(*(self._ask_one(turn, ring) for ring in rings))
        return [prefix for prefix in answers if prefix is not None]

    async def _ask_one(self, turn: RunningTurn, ring: RegisteredRing) -> RetainedPrefix | None:
        registration = ring.registration
        try:
            async with asyncio.timeout(ASK_SECONDS):
                retained = await self._port(ring).get_retained([turn.attempt.wanted.shares_on(ring) or turn.kv_id])
        except (RingserveError, TimeoutError) as error:
            log.info("ring %s cannot say what it retains of %s: %s", ring.name, turn.kv_id, error)
            return None
        num_tokens = min(turn.attempt.wanted.retained_on(ring), *retained.num_tokens)
        return RetainedPrefix(registration, num_tokens) if retained.incarnation == registration.incarnation else None

    # --- prefills and resumptions ------------------------------------------------------------------------------------

    def _start_prefill(self, turn: RunningTurn, plan: TurnPlan) -> asyncio.Task[PrefillDone]:
        turn.to(TurnState.PREFILLING)
        turn.attempt.prefilling = asyncio.create_task(self._prefill(turn, plan))
        turn.attempt.prefilling.add_done_callback(lambda task: _note_computed(turn, task))
        return turn.attempt.prefilling

    def _plan(self, turn: RunningTurn) -> TurnPlan:
        assert turn.attempt.on_decode, "the decode ring has answered"
        asked, prefill = turn.algorithm, turn.attempt.choice.prefill
        is_direct, on_prefill = turn.prefill is None, turn.attempt.on_prefill
        assert is_direct or on_prefill, "both rings have answered"
        prompt = PromptOnRings(
            num_tokens=len(turn.token_ids),
            retained_on_prefill=on_prefill.retained_tokens if on_prefill else turn.attempt.wanted.retained_on(prefill),
            retained_on_decode=turn.attempt.on_decode.retained_tokens,
            prefill=prefill.registration,
            decode=turn.decode.registration,
            leaving=turn.attempt.left,
        )
        if turn.admitted.sparse is not None:
            return self._planner.plan_sparse(prompt, turn.admitted.sparse, mode=turn.admitted.mode)
        if is_direct:
            return self._planner.plan_direct(prompt, mode=turn.admitted.mode, algorithm=asked)
        # If a turn asked for its decode ring to compute the prompt, and a prefill ring resumes it, the planner chooses.
        algorithm = asked if asked in RING_ALGORITHMS else None
        return self._planner.plan(prompt, mode=turn.admitted.mode, algorithm=algorithm)

    async def _prefill(self, turn: RunningTurn, plan: TurnPlan) -> PrefillDone:
        turn.attempt.pulled_from = _retaining_ring(turn, plan)
        request = _joined(turn)
        if turn.prefill is not None:
            request = replace(
                request,
                token_ids=turn.token_ids,
                cached_tokens=plan.cached_tokens,
                chunks=plan.chunks,
                pulled_from=turn.attempt.pulled_from,
                sparsity=turn.sparsity,
            )
        turn.attempt.is_on_prefill_ring = turn.prefill is not None
        computing = turn.attempt.choice.computing
        port = self._peers.leader(computing.role, computing.registration.endpoint)
        return await computing.guarded(port.prefill(request))

    def _on_first_prefill(self, turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
        """Learn from the first prefill.

        If it failed, end the turn where its client waits: on the decode ring's stream.
        """
        if turn.attempt.prefilling is task:
            turn.attempt.load_share.end_prefill()
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            self._note_report(turn, task.result().report)
        if error is None or turn.is_over or turn.attempt.prefilling is not task:
            return
        if not isinstance(error, RingserveError):
            log.error("the prefill of turn %s failed", turn.turn_id, exc_info=error)
            error = Unavailable("the prefill failed for an internal reason; retry")
        if isinstance(error, Unavailable):
            # Perhaps it was the decode ring that could not be reached, so the ring is asked before it is withdrawn.
            self._tasks.spawn(withdraw_if_lost(turn.attempt.choice.computing, self._peers))
        self._tasks.spawn(self._turns.fail(turn, error))

    def _note_report(self, turn: RunningTurn, report: PrefillReport) -> None:
        if turn.admitted.sparse is None:  # corrections are learned from exact turns
            self._planner.note_prefill(turn.attempt.choice.computing.registration, report)
        if turn.attempt.pulled_from is None:
            return
        if report.lost_tokens:
            self._moves.failed(turn.attempt.pulled_from.role, MoveReason.TURN)
        else:
            self._moves.moved(turn.attempt.pulled_from.role, MoveReason.TURN, report.pulled_bytes, report.pull_seconds)

    def rejoin(self, turn: RunningTurn, *, is_joinable: bool) -> None:
        """Go on with a turn of an earlier router.

        With `is_joinable` its ring may still compute the prompt, and is joined.
        """
        turn.to(TurnState.PREFILLING)
        turn.attempt.is_on_prefill_ring = turn.prefill is not None
        turn.attempt.prefilling = asyncio.create_task(self._rejoin(turn, is_joinable))
        turn.attempt.prefilling.add_done_callback(lambda task: _note_computed(turn, task))
        if is_joinable:
            turn.attempt.prefilling.add_done_callback(lambda task: self._on_first_prefill(turn, task))
        else:
            turn.attempt.load_share.end_prefill()
            turn.to(TurnState.DECODING)

    async def _rejoin(self, turn: RunningTurn, is_joinable: bool) -> PrefillDone:
        computing = turn.attempt.choice.computing
        if not is_joinable:
            raise Unavailable(f"ring {computing.name} has no prefill of turn {turn.turn_id}")
        return await self._peers.leader(computing.role, computing.registration.endpoint).prefill(_joined(turn))

    async def resume(self, request: ResumeTurn) -> None:
        """Compute the KV of a preempted turn again. See `Router.resume_turn`."""
        turn = self._turns.of_turn(request.turn_id)
        if turn is None or turn.is_over or turn.state is TurnState.LOST:  # a lost turn is begun again under another id
            raise NotFound(f"turn {request.turn_id} has ended")
        if request.attempt > turn.attempt.number:
            turn.to(TurnState.RESUMING)
            turn.attempt.number = request.attempt
            work = self._resume(turn, np.asarray(request.token_ids, dtype=np.int64))
            turn.attempt.resuming = begin_joined(f"the resumption of turn {turn.turn_id}", work)
        resuming = turn.attempt.resuming
        assert resuming is not None, f"attempt {request.attempt} of turn {request.turn_id} was begun by no resume"
        try:
            await asyncio.shield(resuming)
        except NotFound as error:
            raise self._not_resumed(turn, error) from None
        assert turn.attempt.prefilling is not None, "resumed"
        prefilling = turn.attempt.prefilling
        await asyncio.wait([prefilling])  # ends with the prefill, or when the turn's end cancels it
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
        """Return the error for the decode ring.

        To it NotFound means that the turn has ended, which only the router knows.
        """
        has_ended = turn.is_over or turn.state is TurnState.LOST
        return error if has_ended else Unavailable(str(error))

    async def _resume(self, turn: RunningTurn, decoded: TokenIds) -> None:
        assert turn.attempt.prefilling is not None, "a turn that was decoded was prefilled"
        # The prefill of the attempt before: the decode ring has all its KV, or has aborted it. The sender may not know
        # yet.
        await asyncio.wait([turn.attempt.prefilling], timeout=self._control_timeout)
        if not turn.attempt.prefilling.done():
            raise Unavailable(f"ring {turn.attempt.choice.computing.name} still works on turn {turn.turn_id}")
        _require_resuming(turn)
        turn.attempt.decoded = decoded
        if turn.prefill is None:
            self._turns.take_prefill_ring(turn, self._placer.choose_prefill(turn.attempt.wanted, turn.decode))
        else:
            port = self._peers.leader("prefill", turn.prefill.registration.endpoint)
            await turn.prefill.guarded(port.settle(turn.kv_id, turn.turn_id, len(turn.token_ids) - 1))
            # The turn may have another id by now, under which nobody would release this reservation.
            _require_resuming(turn)
        await self._reserve(turn)
        _require_resuming(turn)
        self._start_prefill(turn, self._plan(turn))


def _with_remarks(turn: RunningTurn, plan: TurnPlan) -> TurnPlan:
    """Complete the plan with remarks on its rings and the predicted seconds of the alternatives."""
    refused = (f"ring {ring.name} had no room, or was gone" for ring in turn.attempt.refused)
    direct, others = turn.attempt.choice.direct, plan.alternatives
    if direct is not None and not turn.attempt.choice.is_direct:
        others = (*others, (Algorithm.DECODE_RING, direct.prefill_seconds))
    return replace(
        plan,
        remarks=(*plan.remarks, *refused, *turn.attempt.choice.remarks),
        decode_turns=turn.decode.num_turns,
        alternatives=others,
        ring_alternatives=turn.attempt.choice.alternatives,
    )


def _reserve_request(turn: RunningTurn) -> Reserve:
    sampling, prefill = turn.request.sampling, turn.prefill
    return Reserve(
        turn_id=turn.turn_id,
        attempt=turn.attempt.number,
        kv_id=turn.kv_id,
        match_tokens=0,
        num_tokens=len(turn.token_ids),
        deadline_seconds=turn.request.deadline_seconds,
        source_incarnation=prefill.registration.incarnation if prefill else "",
        is_direct=prefill is None,
        sampling=sampling,
        penalized_ids=tuple(np.unique(turn.admitted.prompt).tolist()) if sampling.looks_at_prompt else (),
        draft_text=np.concatenate([turn.request.prediction, turn.token_ids])[-DRAFT_TEXT_TOKENS:],
        priority=turn.request.priority,
        request_id=turn.request.request_id,
        trace_parent=turn.request.trace_parent,
        answer=turn.recovery.emitted,
        waited_seconds=time.monotonic() - turn.admitted.taken_at,
    )


def _require_resuming(turn: RunningTurn) -> None:
    """Raise NotFound if the turn has ended meanwhile, or has lost a ring: then it is begun again under another id."""
    if turn.state is not TurnState.RESUMING:
        raise NotFound(f"turn {turn.turn_id} has ended")


def _note_computed(turn: RunningTurn, task: asyncio.Task[PrefillDone]) -> None:
    is_computed = not task.cancelled() and task.exception() is None
    if is_computed and turn.state is TurnState.PREFILLING and turn.attempt.prefilling is task:
        turn.to(TurnState.DECODING)
        note_computed(turn, task.result())


def _retaining_ring(turn: RunningTurn, plan: TurnPlan) -> RetainingRing | None:
    """Return the ring from which the plan pulls cached KV, if it is none of the turn's own."""
    names = [source.ring for source in plan.cached_sources if source.source == PULLED_FROM_OTHER]
    if not names:
        return None
    ring = next(prefix.ring for prefix in turn.attempt.left if prefix.ring.name == names[0])
    return RetainingRing(
        role=ring.role,
        ring=ring.name,
        endpoint=ring.endpoint,
        incarnation=ring.incarnation,
        kv_id=turn.attempt.wanted.shared.get(ring.role, turn.kv_id),
    )


def _joined(turn: RunningTurn) -> PrefillTurn:
    """Return the request that joins a prefill under way. A direct turn's always is: its decode ring knows the rest."""
    assert turn.attempt.on_decode is not None, "the decode ring has answered"
    return PrefillTurn(
        turn_id=turn.turn_id,
        attempt=turn.attempt.number,
        kv_id=turn.kv_id,
        token_ids=turn.token_ids[:0],
        cached_tokens=0,
        chunks=(),
        sampling=turn.request.sampling,
        deadline_seconds=turn.request.deadline_seconds,
        decode_endpoint=turn.decode.registration.endpoint,
        destination=turn.attempt.on_decode,
    )

"""Failover: a running turn that lost a ring, or its stream, is begun again and goes on after the tokens its client has.

Another attempt is fenced from the ones before by a new turn id: a late end of an old id does not count. The turn keeps
its conversation, its place among its tenant's turns, and the KV that its prefill ring has made.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import numpy as np

from ringserve.cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.orchestration.placement.kv_locations import KvLocation, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import BegunTurn, LostTurn, TurnOutcome, TurnRequest
from ringserve.orchestration.router.admission import TurnAdmission
from ringserve.orchestration.router.attempts import TurnAttempts
from ringserve.orchestration.router.drains import RingReturns
from ringserve.orchestration.router.registry import LEASE_SECONDS, TurnRegistry
from ringserve.orchestration.router.turn import RunningTurn, TurnState
from ringserve.orchestration.tasks import TaskSet, finish_despite_cancellation
from ringserve.workers.protocol.prefill_steps import RING_ALGORITHMS

log = logging.getLogger(__name__)

FENCE_SECONDS = 2.0
"""Seconds that a ring gets to release the attempt before; it may be frozen. Then the next attempt goes elsewhere."""
RETRY_SECONDS = 0.25
"""Seconds between attempts to begin a turn for which no ring has room; news of a ring shorten them."""


class Failover:
    """Beginner of turns that have begun before. Such a turn is not refused: it waits for rings until its deadline."""

    def __init__(
        self,
        peers: Peers,
        placer: RingPlacer,
        admission: TurnAdmission,
        attempts: TurnAttempts,
        returns: RingReturns,
        turns: TurnRegistry,
        tasks: TaskSet,
    ) -> None:
        self._peers = peers
        self._placer = placer
        self._admission = admission
        self._attempts = attempts
        self._returns = returns
        self._turns = turns
        self._tasks = tasks

    async def begin_again(self, request: TurnRequest) -> BegunTurn | None:
        """Begin a turn again that lost a ring; where it has ended well meanwhile, return its answer.

        A turn that lost its gateway alone goes on as it is. A turn that the router does not know any more is admitted
        as a new one, with the answer so far; one that may not have begun is left to the caller, with None. Raises
        DeadlineExceeded, TurnCancelled where it was aborted, Busy where another request has its id, and the errors of
        admission.
        """
        lost, deadline = request.resume, asyncio.get_running_loop().time() + request.deadline_seconds
        assert lost is not None, "the turn has begun before"
        turn = self._turns.of_request(request.request_id)
        if turn is not None and turn.ending is not None:
            await asyncio.shield(turn.ending)
            turn = None
        if turn is None:
            answer = self._turns.ended.answer_of(request.request_id)
            if answer is not None and _is_answer_of(answer, request, lost):
                return answer
            if not lost.turn_id and not lost.prompt_tokens:
                return None
            turn = await self._admit(request, lost, deadline)
        elif turn.request.sampling.seed != request.sampling.seed:
            raise Busy(f"request_id: {request.request_id!r} is running already for another request; choose another")
        elif turn.state is TurnState.RESERVING:
            raise Unavailable(f"request {request.request_id!r} is being begun already; retry")
        elif turn.state is not TurnState.LOST and not lost.turn_id:
            turn.request = replace(turn.request, reader=request.reader)
            return turn.as_begun(remembered_tokens=turn.conversation.num_tokens)
        elif turn.state is not TurnState.LOST:
            self._turns.interrupt(turn, "decode")
        if lost.is_complete and turn.state is TurnState.LOST:
            return await self._commit(turn, lost)
        try:
            turn.request = _without_scores(
                replace(
                    turn.request,
                    deadline_seconds=request.deadline_seconds,
                    sampling=replace(request.sampling, max_tokens=turn.request.sampling.max_tokens),
                    reader=request.reader,
                ),
                lost,
            )
            self._turns.lease(turn, request.deadline_seconds + LEASE_SECONDS)
            await self._begin(turn, lost, deadline)
        except BaseException as error:
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._tasks.spawn(self._turns.drop(turn, reason))
            raise
        return turn.as_begun(remembered_tokens=turn.conversation.num_tokens)

    async def _admit(self, request: TurnRequest, lost: LostTurn, deadline: float) -> RunningTurn:
        """Admit a turn that the router does not know any more."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                seconds = max(deadline - clock(), 0.001)
                turn = await self._admission.admit(replace(request, wait=True, deadline_seconds=seconds))
                break
            except (CapacityExceeded, Unavailable):
                if clock() + RETRY_SECONDS >= deadline:
                    raise
                await self._returns.until_news(RETRY_SECONDS)
        if lost.prompt_tokens not in (0, len(turn.prompt)):
            self._tasks.spawn(self._turns.drop(turn, TurnCancelled("its conversation has changed")))
            raise NotFound(
                f"request {request.request_id!r} is not known any more, and its conversation has changed since it began"
            )
        turn.lost_role = "decode"
        return turn

    async def _commit(self, turn: RunningTurn, lost: LostTurn) -> BegunTurn:
        """End a turn well whose answer was complete when its ring was lost."""
        self._tasks.spawn(self._leave_decode(turn, turn.turn_id))
        await self._turns.end(TurnOutcome(turn_id=turn.turn_id, ok=True, token_ids=lost.token_ids))
        answer = self._turns.ended.answer_of(turn.request.request_id)
        if answer is None:  # its end waits for the prefill ring
            assert turn.ending is not None, "just ended"
            await asyncio.shield(turn.ending)
            answer = self._turns.ended.answer_of(turn.request.request_id)
        if answer is None:
            raise TurnCancelled("the turn was ended while it was to go on")
        return answer

    async def _begin(self, turn: RunningTurn, lost: LostTurn, deadline: float) -> None:
        """Begin an attempt, and another where rings refuse it or are lost, until `deadline` on the loop's clock."""
        clock = asyncio.get_running_loop().time
        made: KvLocation | None = None
        told = ""
        while True:
            # Half of it would leave the attempt before pinned on its prefill ring, under an id that nobody knows.
            made = await finish_despite_cancellation(self._fence(turn)) or made
            _check(turn)
            try:
                self._place(turn, lost, made)
                await self._attempts.try_start(turn)
                return
            except (Busy, CapacityExceeded, NotFound, Unavailable) as refusal:
                if turn.is_over or isinstance(turn.stop_error, TurnCancelled):
                    raise
                if clock() + RETRY_SECONDS >= deadline:
                    raise DeadlineExceeded(
                        f"the turn lost a {turn.lost_role} ring and could not go on within its deadline: {refusal}"
                    ) from refusal
                if told != (told := str(refusal)):  # one line for each reason, not for each attempt
                    log.info("request %s cannot go on yet: %s", turn.request.request_id, refusal)
                await self._returns.until_news(RETRY_SECONDS)

    # --- the attempt before ------------------------------------------------------------------------------------------

    async def _fence(self, turn: RunningTurn) -> KvLocation | None:
        """End the latest attempt on its rings, as far as they can be told.

        Return the KV that the prefill ring retains then: it is not computed again.
        """
        if not turn.is_retained:
            turn.lone_kv_id = turn.kv_id
        turn_id = self._turns.rename(turn)
        if turn.resuming is not None:  # reserves on the prefill ring
            await asyncio.gather(turn.resuming, return_exceptions=True)
        prefilling, turn.prefilling = turn.prefilling, None  # how it ends does not count any more
        leaving = self._tasks.spawn(self._leave_decode(turn, turn_id))
        keeping = asyncio.create_task(self._keep_on_prefill(turn, turn_id))
        await asyncio.wait([leaving, keeping], timeout=FENCE_SECONDS)
        if not keeping.done():
            keeping.cancel()
        if prefilling is not None:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)
        for ring in turn.rings:
            if ring not in turn.earlier:
                turn.earlier.append(ring)
        return keeping.result() if keeping.done() and not keeping.cancelled() else None

    async def _leave_decode(self, turn: RunningTurn, turn_id: str) -> None:
        ring = turn.decode
        try:
            moved = TurnCancelled("the turn went to another ring")
            port = self._peers.leader("decode", ring.registration.endpoint)
            await ring.guarded(port.abort_turn(turn_id, moved))
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", ring.name, turn_id, error)
            ring.is_ready = False

    async def _keep_on_prefill(self, turn: RunningTurn, turn_id: str) -> KvLocation | None:
        """End the turn on its prefill ring, which retains what it has computed."""
        ring = turn.prefill
        if ring is None:
            return None
        port = self._peers.leader("prefill", ring.registration.endpoint)
        try:
            await ring.guarded(port.settle(turn.kv_id, turn_id, len(turn.token_ids)))
            retained = await ring.guarded(port.get_retained([turn.kv_id]))
        except RingserveError as error:
            if ring.is_ready:
                log.info("prefill ring %s could not be told to retain %s: %s", ring.name, turn.kv_id, error)
            ring.is_ready = False
            return None
        (num_tokens,), incarnation = retained.num_tokens, retained.incarnation
        if not num_tokens or incarnation != ring.registration.incarnation:
            return None
        # How the tokens lie over the ranks does not matter here.
        shards = ShardMap.of(((TokenRange(0, num_tokens),),))
        return KvLocation(ring=ring.name, incarnation=incarnation, shards=shards)

    # --- the attempt that follows ------------------------------------------------------------------------------------

    def _place(self, turn: RunningTurn, lost: LostTurn, made: KvLocation | None) -> None:
        """Choose rings for the next attempt and move the turn there, under a new id. Raises Unavailable.

        `made` is KV of the turn's own tokens. Scores of the prompt need all of it computed.
        """
        first, request = turn.first_wanted, turn.request
        is_scored = request.sampling.prompt_logprobs is not None
        on_prefill = made or (first.prefill and first.prefill.cut(first.match_tokens))
        decoded = np.asarray(lost.token_ids[:-1], dtype=np.int64)
        num_tokens = len(turn.prompt) + len(decoded)
        wanted = WantedTurn(
            num_tokens=num_tokens,
            answer_tokens=request.sampling.max_tokens - len(decoded),
            match_tokens=0 if is_scored else num_tokens - 1,
            prefill=on_prefill,
            decode=first.decode and first.decode.cut(first.match_tokens),
            algorithm=turn.algorithm if turn.algorithm in RING_ALGORITHMS else None,
            shared={role: kv_id for role, kv_id in first.shared.items() if made is None or role != "prefill"},
        )
        choice = self._placer.choose(wanted)
        if turn.state is TurnState.LOST:
            turn.to(TurnState.RESERVING)
        turn.wanted, turn.emitted, turn.decoded = wanted, lost.token_ids, decoded
        turn.refused, turn.left, turn.attempt, turn.stop_error = [], [], 1, None
        turn.resuming = turn.pulled_from = None
        turn.is_on_prefill_ring = False
        self._turns.move(turn, choice, self._placer.place(wanted, choice))


def _is_answer_of(answer: BegunTurn, request: TurnRequest, lost: LostTurn) -> bool:
    """Return whether an ended turn is the one that was lost, and not an earlier one of the same request id."""
    if lost.turn_id:
        return answer.turn_id == lost.turn_id
    assert answer.ended is not None, "an answer has ended"
    return answer.ended.seed == request.sampling.seed and lost.prompt_tokens in (0, answer.prompt_tokens)


def _without_scores(request: TurnRequest, lost: LostTurn) -> TurnRequest:
    """Return the request without the prompt's log-probabilities where the client has them: they precede all tokens."""
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=None)) if lost.token_ids else request


def _check(turn: RunningTurn) -> None:
    """Raise the error by which a turn was ended meanwhile."""
    if isinstance(turn.stop_error, TurnCancelled):
        raise turn.stop_error
    if turn.is_over:
        raise TurnCancelled("the turn was ended while it was to go on")

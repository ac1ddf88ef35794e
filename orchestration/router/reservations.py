"""Reservations of a router's turns on the rings that serve them. A turn that a ring refuses goes to the next best."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringserve.cp_core.errors import CapacityExceeded, RingserveError, TurnCancelled, Unavailable
from ringserve.orchestration.conversations.prefixes import PromptPrefixes
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.planner import RetainedPrefix
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.plans import TurnPlan
from ringserve.orchestration.protocol.ports import Peers, PrefillPort
from ringserve.orchestration.protocol.turns import Reserve
from ringserve.orchestration.router.registry import TurnRegistry
from ringserve.orchestration.router.turn import RunningTurn
from ringserve.orchestration.tasks import TaskSet
from ringserve.workers.protocol.prefill_steps import Algorithm

log = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Refusals by rings that a turn survives; the next one is the client's error."""
ASK_SECONDS = 2.0
"""Seconds for the answer of a ring that a conversation leaves, on how much of its KV the ring retains."""


class TurnReservations:
    """Reservations of turns on rings. A turn that a ring refuses moves to the next best rings."""

    def __init__(
        self,
        peers: Peers,
        placer: RingPlacer,
        turns: TurnRegistry,
        tasks: TaskSet,
        prefixes: PromptPrefixes | None,
    ) -> None:
        self._peers = peers
        self._placer = placer
        self._turns = turns
        self._tasks = tasks
        self._prefixes = prefixes

    async def reserve_somewhere(self, turn: RunningTurn) -> None:
        """Reserve on the chosen rings or, where they have no room, on the next best ones."""
        while True:
            noting = self._turns.note_begun(turn)  # while the rings reserve
            try:
                await self.reserve(turn)
            except (CapacityExceeded, Unavailable) as refusal:
                await self._try_elsewhere(turn, refusal)
            else:
                return await noting

    async def reserve(self, turn: RunningTurn) -> None:
        """Reserve on the turn's rings. Ask rings that its conversation leaves how much of its KV they retain.

        Rings that refused are added to `turn.refused`. Raises CapacityExceeded, Unavailable.
        """
        if self._prefixes is not None and turn.wanted.shared:
            turn.wanted = self._prefixes.agreeing(turn.wanted, turn.prompt)
        request = _reserve_request(turn)
        # A turn whose prompt its decode ring computes pulls no KV. A later attempt uses its own rings alone.
        asks_left = turn.attempt == 1 and turn.prefill is not None
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
            turn.left = [] if asking is None else await asking
        finally:
            if asking is not None:
                asking.cancel()
        for ring, answer in zip(turn.rings, answers, strict=True):
            if isinstance(answer, Unavailable):
                ring.is_ready = False
            # A decode ring that cannot compute the prompt may have room for KV that comes from a prefill ring.
            if isinstance(answer, Unavailable) or (isinstance(answer, CapacityExceeded) and not request.is_direct):
                turn.refused.append(ring)
        *on_prefill, turn.on_decode = (None if isinstance(each, BaseException) else each for each in answers)
        turn.on_prefill = on_prefill[0] if on_prefill else None
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
        if prefill and turn.on_prefill and turn.on_prefill.incarnation != request.source_incarnation:
            turn.refused.append(prefill)
            raise Unavailable(f"ring {prefill.name} was rebuilt just now; retry")

    def _note_shared(self, turn: RunningTurn) -> None:
        """Take notice of what rings have evicted of the KV that the turn was to share."""
        for ring, reservation in ((turn.prefill, turn.on_prefill), (turn.decode, turn.on_decode)):
            if ring is None or reservation is None or not (kv_id := turn.shares_on(ring)) or self._prefixes is None:
                continue
            if reservation.retained_tokens < turn.match_to_reserve(ring):
                self._prefixes.note_retained(kv_id, ring.role, reservation.incarnation, reservation.retained_tokens)

    async def _try_elsewhere(self, turn: RunningTurn, refusal: RingserveError) -> None:
        """Move a refused turn to the next best rings, and release its reservations on the previous ones.

        A turn whose decode ring could not compute the prompt uses a prefill ring now. Raises `refusal` where no other
        ring is left, after MAX_REFUSALS, where the turn is to end, or where it asked for its decode ring.
        """
        if len(turn.refused) > MAX_REFUSALS or turn.stop_error is not None or turn.is_over:
            raise refusal
        if turn.choice.is_direct:
            if turn.wanted.asks_for_direct:
                raise refusal
            turn.wanted = replace(turn.wanted, refused_direct=turn.decode.name)
        wanted = turn.wanted
        try:
            choice = self._placer.choose(wanted, turn.refused)
        except Unavailable:
            raise refusal from None
        need = wanted.num_tokens + wanted.answer_tokens
        if any(need > ring.registration.capacity_tokens for ring in (choice.prefill, choice.decode)):
            raise refusal
        log.info("turn %s goes to rings %s and %s: %s", turn.turn_id, choice.prefill.name, choice.decode.name, refusal)
        before_prefill, before_decode, retained = turn.prefill, turn.decode, turn.retained_on_prefill
        had_prefill, had_decode = turn.on_prefill is not None, turn.on_decode is not None
        kv_id = turn.kv_id  # the turn's own id where it has no conversation: `move` changes it
        turn_id = self._turns.move(turn, choice, self._placer.place(wanted, choice))
        # Reserved blocks must be free before the turn reserves again. Rings that did not reserve are told, and nothing
        # waits for them. `shield`: a client that hangs up does not cancel the release.
        leaving = [(self._tasks.spawn(self._leave_decode(turn_id, before_decode)), had_decode)]
        if before_prefill is not None:
            work = self.leave_prefill(kv_id, turn_id, before_prefill, retained)
            leaving.append((self._tasks.spawn(work), had_prefill))
        await asyncio.shield(asyncio.gather(*(task for task, had in leaving if had)))

    async def leave_prefill(self, kv_id: str, turn_id: str, ring: RegisteredRing, retain: int) -> None:
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

    def take_prefill_ring(self, turn: RunningTurn) -> None:
        """Choose a prefill ring to resume a turn whose prompt the decode ring had computed. Raises Unavailable."""
        self._turns.take_prefill_ring(turn, self._placer.choose_prefill(turn.wanted, turn.decode))

    def _left_rings(self, turn: RunningTurn) -> list[RegisteredRing]:
        """Return the rings that the conversation leaves and that may retain its KV."""
        return [ring for ring in self._placer.own_rings(turn.wanted) if ring not in (turn.prefill, turn.decode)]

    async def _ask_left(self, turn: RunningTurn, rings: Sequence[RegisteredRing]) -> list[RetainedPrefix]:
        """Ask `rings` how much of the conversation they retain. A ring silent for ASK_SECONDS counts as empty."""
        answers = await asyncio.gather(*(self._ask_one(turn, ring) for ring in rings))
        return [prefix for prefix in answers if prefix is not None]

    async def _ask_one(self, turn: RunningTurn, ring: RegisteredRing) -> RetainedPrefix | None:
        registration = ring.registration
        try:
            async with asyncio.timeout(ASK_SECONDS):
                retained = await self._port(ring).get_retained([turn.wanted.shares_on(ring) or turn.kv_id])
        except (RingserveError, TimeoutError) as error:
            log.info("ring %s cannot say what it retains of %s: %s", ring.name, turn.kv_id, error)
            return None
        num_tokens = min(turn.wanted.retained_on(ring), *retained.num_tokens)
        return RetainedPrefix(registration, num_tokens) if retained.incarnation == registration.incarnation else None


def explain(turn: RunningTurn, plan: TurnPlan) -> TurnPlan:
    """Return the plan with the reason for its rings, and the predicted seconds of the alternatives."""
    refused = "".join(f"; ring {ring.name} had no room or was gone" for ring in turn.refused)
    direct, others = turn.choice.direct, plan.alternatives
    if direct is not None and not turn.choice.is_direct:
        others = (*others, (Algorithm.DECODE_RING, direct.prefill_seconds))
    return replace(
        plan,
        reason=plan.reason + refused + turn.choice.reason,
        alternatives=others,
        ring_alternatives=turn.choice.alternatives,
    )


def _reserve_request(turn: RunningTurn) -> Reserve:
    sampling, prefill = turn.request.sampling, turn.prefill
    return Reserve(
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
        answer=turn.emitted,
        waited_seconds=time.monotonic() - turn.taken_at,
    )

"""Places the router's turns, and places them again where a ring has no room after all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import replace

from cp_core.errors import RingserveError, TurnCancelled, Unavailable
from orchestration.placement.cached_kv import RetainedPrefix
from orchestration.placement.placer import RingPlacer
from orchestration.placement.registry import LoadShare, RegisteredRing
from orchestration.placement.wanted_turn import Choice, WantedTurn
from orchestration.protocol.ports import Peers
from orchestration.protocol.turns import TurnPlan
from orchestration.router.registry import TurnRegistry
from orchestration.router.turn import RunningTurn
from workers.protocol.prefill_steps import Algorithm

log = logging.getLogger(__name__)

MAX_REFUSALS = 3
"""Rings that a turn is refused by before its client hears of it."""
ASK_SECONDS = 2.0
"""How long a turn waits to hear what a ring keeps that its conversation leaves."""


class TurnPlacements:
    """`placer` decides; this carries it out and gives back what was reserved elsewhere. `turns` has the books."""

    def __init__(self, peers: Peers, placer: RingPlacer, turns: TurnRegistry) -> None:
        self._peers = peers
        self._placer = placer
        self._turns = turns
        self._leaving: set[asyncio.Task[None]] = set()

    def choose(self, wanted: WantedTurn) -> Choice:
        """Raises Unavailable."""
        return self._placer.choose(wanted)

    def place(self, wanted: WantedTurn, choice: Choice) -> LoadShare:
        return self._placer.place(wanted, choice)

    async def try_elsewhere(self, turn: RunningTurn, refusal: RingserveError) -> None:
        """Move a turn that was refused to the next best rings, with nothing left on those before.

        One whose decode ring could not compute the prompt itself goes over a prefill ring now. Raises `refusal` where
        there is no other ring, the turn was refused too often, is to end, or asked for this alone.
        """
        if len(turn.refused) > MAX_REFUSALS or turn.stop_error is not None or turn.ending is not None:
            raise refusal
        if turn.choice.is_direct:
            if turn.wanted.asks_for_direct:
                raise refusal
            turn.wanted = replace(turn.wanted, refused_direct=turn.decode.name)
        try:
            choice = self._placer.choose(turn.wanted, turn.refused)
        except Unavailable:
            raise refusal from None
        wanted = turn.wanted
        if any(
            wanted.num_tokens + wanted.answer_tokens > ring.registration.capacity_tokens
            for ring in (choice.prefill, choice.decode)
        ):
            raise refusal
        log.info("turn %s goes to rings %s and %s: %s", turn.turn_id, choice.prefill.name, choice.decode.name, refusal)
        before_prefill, before_decode = turn.prefill, turn.decode
        keep, has_prefill, has_decode = (
            turn.retained_on_prefill,
            turn.on_prefill is not None,
            turn.on_decode is not None,
        )
        turn_id = self._turns.move(turn, choice, self._placer.place(wanted, choice))
        # What was reserved must be free before it can be reserved anew; rings that are gone are not waited for. A
        # client that hangs up meanwhile does not stop it.
        leaving = [(self._spawn(self._leave_decode(turn_id, before_decode)), has_decode)]
        if before_prefill is not None:
            leaving.append((self._spawn(self._leave_prefill(turn, turn_id, before_prefill, keep)), has_prefill))
        await asyncio.shield(asyncio.gather(*(task for task, has in leaving if has)))

    def take_prefill_ring(self, turn: RunningTurn) -> None:
        """Of a turn that its decode ring computed itself, to be resumed. Raises Unavailable."""
        self._turns.take_prefill_ring(turn, self._placer.choose_prefill(turn.wanted, turn.decode))

    async def _leave_prefill(self, turn: RunningTurn, turn_id: str, ring: RegisteredRing, keep: int) -> None:
        try:
            port = self._peers.leader("prefill", ring.registration.endpoint)
            await port.settle(turn.kv_id, turn_id, keep)
        except RingserveError as error:
            log.info("prefill ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    async def _leave_decode(self, turn_id: str, ring: RegisteredRing) -> None:
        try:
            moved = TurnCancelled("the turn went to another ring")
            await self._peers.leader("decode", ring.registration.endpoint).abort_turn(turn_id, moved)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", ring.name, turn_id, error)

    def left_rings(self, turn: RunningTurn) -> list[RegisteredRing]:
        """Rings that the conversation leaves, and that may keep KV of it."""
        return [ring for ring in self._placer.own_rings(turn.wanted) if ring not in (turn.prefill, turn.decode)]

    async def ask_left(self, turn: RunningTurn, rings: Sequence[RegisteredRing]) -> list[RetainedPrefix]:
        """What `rings` still keep of its conversation. One that does not answer soon keeps nothing."""
        answers = await asyncio.gather(*(self._ask_left(turn, ring) for ring in rings))
        return [kept for kept in answers if kept is not None]

    async def _ask_left(self, turn: RunningTurn, ring: RegisteredRing) -> RetainedPrefix | None:
        registration, wanted = ring.registration, turn.wanted
        port = self._peers.leader(ring.role, registration.endpoint)
        try:
            async with asyncio.timeout(ASK_SECONDS):
                kept = await port.get_retained([turn.kv_id])
        except (RingserveError, TimeoutError) as error:
            log.info("ring %s cannot say what it keeps of %s: %s", ring.name, turn.kv_id, error)
            return None
        num_tokens = min(wanted.retained_on(ring), *kept.num_tokens)
        return RetainedPrefix(registration, num_tokens) if kept.incarnation == registration.incarnation else None

    def explain(self, turn: RunningTurn, plan: TurnPlan) -> TurnPlan:
        """The plan with why its rings were taken, and what others would have taken."""
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

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def close(self) -> None:
        """End background work."""
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

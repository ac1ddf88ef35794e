"""Carries out what `decode_room` decides on a running decode ring: turns grow, give way and come back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from cp_core.errors import RingserveError
from orchestration.decode.feed import DecodeFeed
from orchestration.decode.room import DecodeRoom
from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.handoff import HandoffState
from orchestration.protocol.ports import RouterPort
from orchestration.protocol.turns import ResumeTurn
from orchestration.ring.kv_transfers import drop
from orchestration.ring.life import Ring

log = logging.getLogger(__name__)

RESUME_PAUSE_SECONDS = 0.5
"""Between attempts to resume a turn that the prefill ring cannot take now; the turn's deadline bounds them."""


class Preemption:
    """`RoomActions` of one ring incarnation. `spawn` runs work in the background for as long as the leader lives."""

    def __init__(
        self,
        ring: Ring,
        batch: DecodeFeed,
        router: RouterPort,
        spawn: Callable[[Coroutine[None, None, None]], object],
    ) -> None:
        settings = ring.settings
        self.room = DecodeRoom(ring.pool, settings.headroom_tokens, can_preempt=settings.preemption, actions=self)
        self._ring = ring
        self._batch = batch
        self._router = router
        self._spawn = spawn

    def grow(self, turn: DecodeTurn, blocks: list[list[int]]) -> None:
        self._batch.grow(turn, blocks)

    def rejoin(self, turn: DecodeTurn) -> None:
        self._batch.join_soon(turn)

    def preempt(self, turn: DecodeTurn) -> None:
        self._spawn(self._preempt(turn))

    def resume(self, turn: DecodeTurn) -> None:
        self._spawn(self._resume(turn))

    async def _preempt(self, turn: DecodeTurn) -> None:
        """Take a turn out of the batch and drop its KV, for an older one. Unless it ends just now."""
        try:
            async with asyncio.timeout(self._ring.settings.control_timeout):
                await self._batch.leave(turn)
        except (RingserveError, TimeoutError) as error:
            self._ring.report_lost(error, turn.reservation.incarnation)
            return
        if not turn.is_ending:
            turn.state = turn.state.to(HandoffState.PREEMPTED)
            log.info("turn %s gives way to an older one after %d tokens", turn.turn_id, len(turn.tokens))
            self.room.given_way(turn)

    async def _resume(self, turn: DecodeTurn) -> None:
        """Have the KV of a preempted turn made again, by a new attempt of its prefill.

        A turn that cannot be resumed now keeps its new blocks and is tried again; its own deadline ends that.
        """
        turn.num_attempts += 1
        attempt = turn.num_attempts
        request = ResumeTurn(
            turn_id=turn.turn_id,
            attempt=attempt,
            token_ids=tuple(turn.tokens[:-1]),
            deadline_seconds=turn.request.deadline_seconds,
        )
        try:
            await self._router.resume_turn(request)
        except RingserveError as error:
            is_whole = turn.request.attempt == attempt and turn.state not in (
                HandoffState.RESERVED,
                HandoffState.STREAMING,
            )
            if turn.is_ending or is_whole:
                return
            log.warning("turn %s could not be resumed, trying again: %s", turn.turn_id, error)
            await self._take_back(turn)
            await asyncio.sleep(RESUME_PAUSE_SECONDS)
            if not turn.is_ending:
                self.room.give_up(turn)

    async def _take_back(self, turn: DecodeTurn) -> None:
        """Where the ring expected that attempt already: no byte of it is written after this."""
        if turn.state is HandoffState.PREEMPTED:
            return
        turn.state = turn.state.to(HandoffState.PREEMPTED)
        if turn.sealing is not None:
            turn.sealing.cancel()
        await drop(self._ring, turn.key)

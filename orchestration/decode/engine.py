"""What decodes on a ring at present: the batch of turns, and the blocks that they have and want."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from cp_core.errors import RingserveError, Unavailable
from orchestration.decode.feed import DecodeFeed
from orchestration.decode.preemption import Preemption
from orchestration.decode.room import DecodeRoom
from orchestration.decode.turn import DecodeTurn
from orchestration.protocol.ports import RouterPort
from orchestration.ring.kv_pool import SequenceKv
from orchestration.ring.life import Ring
from workers.protocol.decode_commands import ComputePrompt, DecodeEvent, FinishReason


class DecodeEngine:
    """Outlives the ring's incarnations: `start` gives each one an empty batch and room of its own, `stop` ends both.

    Between the two, turns enter and leave, and the turns' tokens go where their streams find them; `on_last_token` is
    told which turn has come to its end, and why. `spawn` runs work in the background for as long as the leader lives.
    """

    def __init__(
        self,
        ring: Ring,
        router: RouterPort,
        spawn: Callable[[Coroutine[None, None, None]], object],
        on_last_token: Callable[[DecodeTurn, FinishReason], None],
    ) -> None:
        self._ring = ring
        self._router = router
        self._spawn = spawn
        self._on_last_token = on_last_token
        self._batch: DecodeFeed | None = None
        self._room: DecodeRoom | None = None
        self._earlier_preemptions = 0  # of incarnations that are gone

    @property
    def num_running(self) -> int:
        """Turns in the batch."""
        return self._batch.num_running if self._batch else 0

    @property
    def num_preemptions(self) -> int:
        """How often a turn gave its blocks to an older one."""
        return self._earlier_preemptions + (self._room.num_preemptions if self._room else 0)

    def start(self) -> None:
        """The ring serves, in a new incarnation."""
        settings = self._ring.settings
        self._batch = DecodeFeed(
            self._ring.ranks[0],
            settings.ranks.max_batch,
            settings.control_timeout,
            self._on_event,
            continuous=settings.continuous,
        )
        self._room = Preemption(self._ring, self._batch, self._router, self._spawn).room
        self._spawn(self._read(self._batch, self._ring.incarnation))

    def stop(self, error: RingserveError) -> None:
        """The ring is lost; its ranks write nothing any more. Idempotent."""
        if self._batch is not None:
            self._batch.abandon(error)
        self._earlier_preemptions = self.num_preemptions
        self._batch, self._room = None, None

    def require_started(self) -> None:
        """Raises Unavailable."""
        if self._room is None:
            raise Unavailable(f"ring {self._ring.settings.name} is shutting down")

    def reserve(self, sequence: SequenceKv, filled: tuple[int, ...], max_tokens: int) -> int:
        """See `DecodeRoom.reserve`. Raises CapacityExceeded."""
        assert self._room is not None, "asked for before"
        return self._room.reserve(sequence, filled, max_tokens)

    async def compute(self, turn: DecodeTurn, prompt: ComputePrompt) -> DecodeEvent:
        """See `DecodeFeed.compute`. Raises Unavailable."""
        self.require_started()
        assert self._batch is not None, "started"
        return await self._batch.compute(turn, prompt)

    async def enter(self, turn: DecodeTurn) -> None:
        """Decode a turn whose KV is whole, as soon as it has a place. Raises Unavailable."""
        assert self._batch is not None and self._room is not None, "a sealed turn has a ring"
        self._room.enter(turn)
        await self._batch.join(turn)

    async def leave(self, turn: DecodeTurn) -> None:
        """After this the decode loop writes to none of the turn's blocks.

        Raises Unavailable where the ring does not say so in time: it may still be writing.
        """
        if self._batch is None or not self._ring.is_serving(turn.reservation.incarnation):
            return  # those ranks are dead
        timeout = self._ring.settings.control_timeout
        try:
            async with asyncio.timeout(timeout):
                await self._batch.leave(turn)
        except TimeoutError:
            raise Unavailable(f"the decode loop did not let go of turn {turn.turn_id} within {timeout:.1f} s") from None

    def ending(self, turn: DecodeTurn) -> None:
        """The turn wants no more blocks. `freed` follows."""
        if self._room is not None:
            self._room.end(turn)

    def freed(self, turn: DecodeTurn) -> None:
        """The turn's blocks are back in their pool."""
        if self._room is not None and self._ring.is_serving(turn.reservation.incarnation):
            self._room.freed(turn)

    async def _read(self, batch: DecodeFeed, incarnation: str) -> None:
        try:
            await batch.read()
        except RingserveError as error:
            self._ring.report_lost(error, incarnation)

    def _on_event(self, turn: DecodeTurn, event: DecodeEvent) -> None:
        if event.token_id is not None:
            turn.add_token(event.token_id, event.logprobs)
        if turn.is_ending or self._room is None:
            return
        if event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._on_last_token(turn, event.finish_reason)
        elif event.is_preempted:
            self._room.pause(turn)
        else:
            self._room.note_token(turn)

"""The leader of a prefill ring: pins sequences, takes turns first come first served, keeps KV between turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cp_core.errors import CapacityExceeded, DeadlineExceeded, NotFound, RingserveError, TurnCancelled, Unavailable
from orchestration.group import GroupLeader
from orchestration.kv_pool import KvPool, SequenceKv
from orchestration.ports import Peers, RankFactory
from orchestration.prefill_run import PrefillRun
from orchestration.ring import GroupSettings
from orchestration.turn import (
    Admit,
    GroupRegistration,
    GroupStatus,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reservation,
    Reserve,
)

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""How long past its deadline a turn is left to the router before this ring frees it by itself."""


@dataclass(slots=True)
class _Turn:
    """A reserved turn. `pool` is that of its reservation: a rebuilt ring has another."""

    request: Reserve
    reservation: Reservation
    pool: KvPool
    sequence: SequenceKv
    lease: asyncio.TimerHandle
    run: PrefillRun | None = None
    task: asyncio.Task[PrefillDone] | None = None
    is_computing: bool = False
    error: RingserveError | None = None
    reserved_at: float = field(default_factory=time.monotonic)

    def stop(self, error: RingserveError) -> None:
        """Ask the turn to end: at once where it waits, at the next chunk where it computes."""
        self.error = self.error or error
        if self.run is not None:
            self.run.stop_error = self.error
        if self.task is not None and not self.is_computing:
            self.task.cancel()


class PrefillLeader(GroupLeader):
    """Owns one prefill ring. `announce` tells the router when the ring (again) serves."""

    def __init__(
        self,
        settings: GroupSettings,
        factory: RankFactory,
        peers: Peers,
        announce: Callable[[GroupRegistration], Awaitable[None]],
    ) -> None:
        super().__init__(settings, factory, announce)
        self._peers = peers
        self._turns: dict[str, _Turn] = {}
        self._turn_at_work = asyncio.Lock()  # fair: turns compute in the order in which they asked
        self._num_waiting = 0

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence and hold room for the whole prompt on every rank. Idempotent per turn."""
        known = self._turns.get(request.turn_id)
        if known is not None:
            return known.reservation
        self.ring.require_ready()
        if len(self._turns) >= self.settings.max_waiting:
            raise CapacityExceeded(
                f"prefill ring {self.settings.name}: {len(self._turns)} turns are under way and at most "
                f"{self.settings.max_waiting} are allowed; retry later"
            )
        pool = self.ring.pool
        sequence = pool.pin(request.sequence_id, request.turn_id, request.match_tokens)
        kept = sequence.shards.num_tokens
        try:
            pool.make_room(sequence, _most_held(sequence.shards.held, request.num_tokens - kept))
        except CapacityExceeded:
            pool.settle(request.sequence_id, request.turn_id, kept)
            raise
        reservation = Reservation(
            incarnation=self.ring.incarnation,
            kept_tokens=kept,
            shards=sequence.shards,
            kv_endpoints=self.ring.kv_endpoints,
            tp=self.settings.tp,
        )
        delay = request.deadline_seconds + LEASE_SECONDS
        lease = asyncio.get_running_loop().call_later(delay, self._lease_ended, request)
        self._turns[request.turn_id] = _Turn(request, reservation, pool, sequence, lease)
        return reservation

    async def prefill(self, request: PrefillTurn) -> PrefillDone:
        """Run a reserved turn. Asking again joins the running one; losing the caller does not end it, an abort does."""
        turn = self._turns.get(request.turn_id)
        if turn is None:
            raise NotFound(f"turn {request.turn_id} has no reservation on prefill ring {self.settings.name}")
        if turn.task is None:
            if turn.error is not None:
                raise turn.error
            decode = self._peers.decode(request.decode_endpoint)
            incarnation = turn.reservation.incarnation
            turn.run = PrefillRun(self.ring, turn.pool, turn.sequence, incarnation, request, decode)
            turn.task = asyncio.create_task(self._run(turn, turn.run, request))
        return await asyncio.shield(turn.task)

    async def _run(self, turn: _Turn, run: PrefillRun, request: PrefillTurn) -> PrefillDone:
        pulling = asyncio.create_task(run.pull())  # while others compute
        try:
            async with self._my_turn():
                pulled = await pulling
                queue_seconds = time.monotonic() - turn.reserved_at
                turn.is_computing = True
                first_token, seconds = await run.compute()
                turn.is_computing = False
            report = PrefillReport(
                prefill_seconds=seconds,
                queue_seconds=queue_seconds,
                pulled_bytes=pulled.payload_bytes,
                pull_seconds=pulled.seconds,
            )
            admit = Admit(
                turn_id=request.turn_id,
                attempt=request.attempt,
                first_token=first_token,
                report=report,
                logprobs=run.first_logprobs,
                prompt_logprobs=run.prompt_logprobs,
            )
            await self._peers.decode(request.decode_endpoint).admit(admit)
            await run.hand_over()
            return PrefillDone(report=report, shards=turn.sequence.shards)
        except asyncio.CancelledError:
            if turn.error is None:
                raise
            raise turn.error from None
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            await run.let_go()

    @asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        self._num_waiting += 1
        try:
            await self._turn_at_work.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._turn_at_work.release()

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """End a turn; returns when no rank touches its blocks. Idempotent.

        Raises DeadlineExceeded where a step under way does not end in the step timeout; the ring is then rebuilt.
        """
        turn = self._turns.get(turn_id)
        if turn is None:
            return
        turn.stop(error)
        if turn.task is not None:
            done, _ = await asyncio.wait([turn.task], timeout=self.settings.step_timeout)
            if not done:
                stuck = DeadlineExceeded(f"a step of ring {self.settings.name} did not end")
                self.ring.report_lost(stuck, turn.reservation.incarnation)
                raise stuck

    async def settle(self, sequence_id: str, turn_id: str, keep_tokens: int) -> None:
        """Unpin a sequence, keeping its first `keep_tokens` tokens. A turn that still runs is aborted first."""
        turn = self._turns.get(turn_id)
        if turn is None:
            self.ring.pool.settle(sequence_id, turn_id, keep_tokens)
            return
        await self.abort_turn(turn_id, TurnCancelled("the turn was settled before it ended"))
        turn.lease.cancel()
        self._turns.pop(turn_id, None)
        turn.pool.settle(sequence_id, turn_id, keep_tokens)

    def _lease_ended(self, request: Reserve) -> None:
        log.warning("turn %s was never settled by the router; its KV is freed now", request.turn_id)
        self.spawn(self.settle(request.sequence_id, request.turn_id, 0))

    async def measure(self) -> None:
        """Between two turns."""
        async with self._turn_at_work:
            await self.ring.measure()
        await self.announce()

    @property
    def is_computing(self) -> bool:
        return self._turn_at_work.locked()

    async def get_status(self) -> GroupStatus:
        return self.status_with(running=int(self.is_computing), waiting=self._num_waiting)

    async def fail_all(self, error: RingserveError) -> None:
        for turn in self._turns.values():
            turn.stop(error)

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        await super().close()


def _most_held(held: tuple[int, ...], num_tokens: int) -> list[int]:
    """Tokens that each rank may come to hold when `num_tokens` more arrive, pulled (levelling) or computed (even)."""
    num_ranks = len(held)
    level = -(-(sum(held) + num_tokens) // num_ranks)
    return [max(own + -(-num_tokens // num_ranks), level) + 4 if num_tokens else own for own in held]

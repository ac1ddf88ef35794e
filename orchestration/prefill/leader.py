"""Prefill ring leader: it pins sequences, queues turns for its steps, retains KV between turns. The router calls it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from ringserve.cp_core.cost.steps import StepLimits, WorkModel
from ringserve.cp_core.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.cp_core.layout.shards import TokenRange
from ringserve.orchestration.prefill.loop import PrefillLoop
from ringserve.orchestration.prefill.run import PrefillRun
from ringserve.orchestration.prefill.scheduler import PrefillScheduler, worst_case_held
from ringserve.orchestration.protocol.inventory import TurnOnRing
from ringserve.orchestration.protocol.ports import Peers, RankFactory
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.protocol.turns import (
    Admit,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reservation,
    Reserve,
)
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.orchestration.ring.leader import Announce, RingLeader
from ringserve.orchestration.tasks import begin_joined
from ringserve.views import RingInfo

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""Seconds that the router has to settle a turn, from its deadline or its ring's loss. Then the leader releases it."""


@dataclass(slots=True)
class _Turn:
    """A reserved turn, with the pool and the loop of the incarnation that reserved it."""

    request: Reserve
    reservation: Reservation
    pool: KvPool
    loop: PrefillLoop
    sequence: SequenceKv
    lease: asyncio.TimerHandle
    run: PrefillRun | None = None
    task: asyncio.Task[PrefillDone] | None = None
    is_cleaning_up: bool = False
    error: RingserveError | None = None
    reserved_at: float = field(default_factory=time.monotonic)

    def stop(self, error: RingserveError) -> None:
        """End the turn: at once if it waits, after the current layer or step if it computes."""
        self.error = self.error or error
        self.loop.scheduler.remove(self.request.turn_id)
        if self.run is not None:
            self.run.stop_error = self.error
            self.loop.wake()
        if self.task is not None and not self.is_cleaning_up and not (self.run and self.run.is_computing):
            self.task.cancel()


class PrefillLeader(RingLeader):
    """Prefill ring owner. `announce` tells the router that the ring serves, for the first time or again.

    `loop` runs the steps of the ring's present incarnation; it is None before the first.
    """

    def __init__(
        self,
        settings: RingSettings,
        factory: RankFactory,
        peers: Peers,
        announce: Announce,
    ) -> None:
        super().__init__(settings, factory, peers, announce)
        self._peers = peers
        self._turns: dict[str, _Turn] = {}
        self.loop: PrefillLoop | None = None

    async def on_ready(self) -> None:
        """Start the queue and the loop of a new incarnation, and announce the ring."""
        ring, settings = self.ring, self.settings
        work = WorkModel.of_shape(ring.model.shape)
        scheduler = PrefillScheduler(
            settings.name,
            work,
            self._limits(work),
            settings.prefill_scheduling,
            rate=self._rate(work),
            lone_limits=self._lone_limits(work),
            shares=self.shares,
        )
        self.loop = PrefillLoop(ring, scheduler, self.layout_fallbacks)
        self.spawn(self.loop.run())
        await super().on_ready()

    def _rate(self, work: WorkModel) -> float:
        """Return the work units that the ring computes in a second, from its measured rate of matrix products alone."""
        return self.settings.num_processes * self.ring.rates.gemm_flops / work.flops_per_unit

    def _limits(self, work: WorkModel, num_layers: float = 1.0) -> StepLimits:
        """Return the limits of a step that takes at most `num_layers * step_seconds`."""
        scheduling = self.settings.prefill_scheduling
        seconds = scheduling.step_seconds * num_layers
        return StepLimits.of(
            work,
            step_budget=scheduling.step_budget,
            chunk_tokens=self.settings.chunk_tokens,
            min_chunk_tokens=scheduling.min_chunk_tokens,
            most_work=seconds * self._rate(work) if seconds else math.inf,
        )

    def _lone_limits(self, work: WorkModel) -> StepLimits | None:
        """Return the limits of a step that yields between its layers; None on devices other than CPUs.

        To yield, the ranks' threads agree after each layer. A GPU computes behind its thread, which would have to wait
        for it there. If `ranks.cores` is set, decode steps on the same cores may double the time of a layer, so that
        half as many layers are counted.
        """
        ranks, num_layers = self.settings.ranks, self.ring.model.num_layers
        return self._limits(work, num_layers / 2 if ranks.cores else num_layers) if ranks.device == "cpu" else None

    @property
    def step_budget(self) -> float:
        return self.loop.scheduler.lone_limits.budget if self.loop is not None else super().step_budget

    @property
    def waiting_work(self) -> float:
        return self.loop.scheduler.load if self.loop is not None else 0.0

    @property
    def work_rate(self) -> float:
        return self.loop.scheduler.rate if self.loop is not None else 0.0

    async def reserve(self, request: Reserve) -> Reservation:
        """Pin the sequence and reserve blocks for the whole prompt on every rank. Idempotent per turn."""
        await self.kv_moves.until_free(request.kv_id)
        known = self._turns.get(request.turn_id)
        if known is not None:
            return known.reservation
        self.ring.require_ready()
        loop = self.loop
        assert loop is not None, "a ring that serves has a loop"
        self._check_turns(loop.scheduler, request)
        pool = self.ring.pool
        sequence = pool.pin(request.kv_id, request.turn_id, request.match_tokens, shares=request.shares)
        retained = sequence.shards.num_tokens
        try:
            # At most: tokens that the decode ring retains will be pulled.
            new = TokenRange(retained, request.num_tokens)
            began = time.monotonic() - request.waited_seconds
            loop.scheduler.reserve(
                request.turn_id,
                tokens=new,
                priority=request.priority,
                now=began,
                tenant=request.tenant,
                has_begun=request.has_begun,
            )
            pool.make_room(sequence, worst_case_held(sequence.shards.held, len(new)))
        except CapacityExceeded:
            loop.scheduler.remove(request.turn_id)
            pool.settle(request.kv_id, request.turn_id, retained)
            raise
        reservation = Reservation(
            incarnation=self.ring.incarnation,
            retained_tokens=retained,
            shards=sequence.shards,
            kv_endpoints=self.ring.kv_endpoints,
            tp=self.settings.ranks.tp,
        )
        delay = request.deadline_seconds + LEASE_SECONDS
        lease = asyncio.get_running_loop().call_later(delay, self._lease_ended, request)
        self._turns[request.turn_id] = _Turn(request, reservation, pool, loop, sequence, lease)
        return reservation

    async def prefill(self, request: PrefillTurn) -> PrefillDone:
        """Run a reserved turn. A second call joins the first. If the caller is lost, the turn goes on."""
        turn = self._turns.get(request.turn_id)
        if turn is None:
            raise NotFound(f"turn {request.turn_id} has no reservation on prefill ring {self.settings.name}")
        if turn.task is None:
            if turn.error is not None:
                raise turn.error
            incarnation = turn.reservation.incarnation
            turn.run = PrefillRun(self.ring, turn.pool, turn.sequence, incarnation, request, self._peers)
            turn.task = begin_joined(f"turn {request.turn_id}", self._run(turn, turn.run, request))
        try:
            return await asyncio.shield(turn.task)
        except asyncio.CancelledError:
            if turn.error is not None and turn.task.cancelled():  # stopped before its task began
                raise turn.error from None
            raise

    async def _run(self, turn: _Turn, run: PrefillRun, request: PrefillTurn) -> PrefillDone:
        try:
            preparing = self.preparing_grammar(request.sampling.grammar) if request.sampling.grammar else None
            pulled = await run.pull()  # while other turns compute
            if preparing is not None:
                await preparing
            first_token = await turn.loop.compute(run)
            report = PrefillReport(
                prefill_seconds=run.prefill_seconds,
                queue_seconds=time.monotonic() - turn.reserved_at - run.prefill_seconds,
                pulled_bytes=pulled.payload_bytes,
                pull_seconds=pulled.seconds,
                chunks=tuple(run.chunks),
                lost_tokens=run.lost_tokens,
            )
            admit = Admit(
                turn_id=request.turn_id,
                attempt=request.attempt,
                first_token=first_token,
                report=report,
                logprobs=run.first_logprobs,
                prompt_logprobs=run.prompt_logprobs,
            )
            log.info(
                "turn %s was prefilled in %.3f s",
                request.turn_id,
                report.prefill_seconds,
                extra=turn.request.log_fields,
            )
            await self._peers.leader("decode", request.decode_endpoint).admit(admit)
            await run.hand_over()
            return PrefillDone(report=report, shards=turn.sequence.shards)
        except asyncio.CancelledError:
            if turn.error is None:
                raise
            raise turn.error from None
        finally:
            turn.is_cleaning_up = True
            turn.loop.scheduler.remove(request.turn_id)
            await run.clean_up()
            self._trace(turn, run)

    def _trace(self, turn: _Turn, run: PrefillRun) -> None:
        request = turn.request
        if request.trace_parent:
            name, now = self.settings.name, time.monotonic()
            self.tracer.record(request.trace_parent, run.times.spans(name, request.attempt, turn.reserved_at, now))

    def _check_turns(self, scheduler: PrefillScheduler, request: Reserve) -> None:
        """Raise CapacityExceeded at the limit of turns. A turn counts, and its KV is pinned, until it is settled."""
        self.shares.check_turns(
            request,
            (turn.request for turn in self._turns.values()),
            max_turns=self.settings.max_waiting,
            kv_tokens=self.ring.pool.capacity_tokens,
            retry=scheduler.seconds_for(scheduler.load / max(1, len(self._turns))),
        )

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """End a turn; return when no rank uses its blocks. Idempotent.

        Raises DeadlineExceeded if the present step does not end within the step timeout; the ring is then rebuilt.
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

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        """Unpin a sequence and retain its first `retain_tokens` tokens. A turn that still runs is aborted first."""
        turn = self._turns.get(turn_id)
        if turn is None:
            await self.kv_moves.until_free(kv_id)
            self.ring.pool.settle(kv_id, turn_id, retain_tokens)
            return
        await self.abort_turn(turn_id, TurnCancelled("the turn was settled before it ended"))
        turn.lease.cancel()
        self._turns.pop(turn_id, None)
        turn.pool.settle(kv_id, turn_id, retain_tokens, is_guest=turn.request.is_spare)

    def _lease_ended(self, request: Reserve) -> None:
        turn = self._turns.get(request.turn_id)
        if turn is not None and self.ring.is_serving(turn.reservation.incarnation):
            log.warning("turn %s was never settled by the router; its KV is released now", request.turn_id)
        else:  # expected: the router settles no turn on a ring that it considers lost
            log.info("turn %s of a lost ring is released", request.turn_id)
        self.spawn(self.settle(request.kv_id, request.turn_id, 0))

    async def measure(self, until_quiet: Callable[[], Awaitable[None]]) -> None:
        """Measure the ring's rates between steps. A turn waits for one part of the measurement at most."""
        loop = self.loop
        assert loop is not None, "the ring has started"

        @asynccontextmanager
        async def alone() -> AsyncIterator[None]:
            await until_quiet()
            async with loop.at_work:
                yield

        await self.ring.measure(alone)
        work = WorkModel.of_shape(self.ring.model.shape)
        loop.scheduler.limit_steps(self._limits(work), self._lone_limits(work))
        await self.announce()

    @property
    def is_computing(self) -> bool:
        """True during a step."""
        return self.loop is not None and self.loop.at_work.locked()

    def turns_here(self) -> tuple[TurnOnRing, ...]:
        """Return the turns that are not settled."""
        return tuple(
            TurnOnRing(
                turn_id=turn_id,
                kv_id=turn.request.kv_id,
                attempt=turn.request.attempt,
                retained_tokens=turn.reservation.retained_tokens,
                is_begun=turn.task is not None,
            )
            for turn_id, turn in self._turns.items()
        )

    @property
    def num_turns(self) -> int:
        """Turns that are not settled."""
        return len(self._turns)

    async def get_status(self) -> RingInfo:
        """Return the ring's state and the load of its queue."""
        runs = [turn.run for turn in self._turns.values() if turn.run is not None]
        computing = sum(run.is_computing for run in runs)
        scheduler = self.loop.scheduler if self.loop is not None else None
        status = self.status_with(
            running=computing, waiting=max(0, scheduler.num_waiting - computing) if scheduler else 0
        )
        return replace(
            status,
            waiting_work=self.waiting_work,
            max_waiting_work=self.settings.prefill_scheduling.max_queue_work,
        )

    async def fail_all(self, error: RingserveError) -> None:
        """End every turn with `error`, and the loop.

        The router settles no turn on a ring that it knows to be lost. Without a shorter lease, each turn would keep its
        place here until its deadline.
        """
        loop = asyncio.get_running_loop()
        for turn in self._turns.values():
            turn.stop(error)
            if turn.lease.when() > loop.time() + LEASE_SECONDS:
                turn.lease.cancel()
                turn.lease = loop.call_later(LEASE_SECONDS, self._lease_ended, turn.request)
        if self.loop is not None:
            self.loop.end()

    async def close(self) -> None:
        """End every turn and the ring."""
        await self.fail_all(Unavailable(f"ring {self.settings.name} is shutting down"))
        await super().close()

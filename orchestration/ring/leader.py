"""Common part of prefill and decode leaders: the ring, its announcement and drain, its retained KV, its status.

`TenantShares` limits what one tenant takes of the ring's queue and KV: never all of it while other tenants ask too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from ringserve.cp_core.errors import CapacityExceeded, RingserveError, StaleIncarnation, Unavailable
from ringserve.orchestration.protocol.inventory import KnownEpoch, Registered, RingInventory, TurnOnRing
from ringserve.orchestration.protocol.ports import Peers, RankFactory
from ringserve.orchestration.protocol.rings import RingSettings, RingState
from ringserve.orchestration.protocol.turns import (
    ForkedKv,
    ForkKv,
    NoTracer,
    Reserve,
    RetainedKv,
    RingRegistration,
    SendKv,
    SentKv,
    TakeKv,
    TakenKv,
    Tracer,
    exceeds_share,
)
from ringserve.orchestration.ring.kv_transfers import KvMoves, copy_blocks
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.tasks import TaskSet, gather_first_error
from ringserve.views import RingInfo

log = logging.getLogger(__name__)


RETRY_SECONDS = 0.25
"""Seconds between announcements while the router cannot be reached. Once restarted, it waits for the rings."""
GRAMMAR_SECONDS = 60.0
"""Seconds that the ranks have to compile a grammar before a step needs it."""
PRESENT_SECONDS = 600.0
"""Seconds after a tenant's latest request for which other tenants must leave room for its next turn."""
Announce = Callable[[RingRegistration, KnownEpoch], Awaitable[Registered]]
"""Announcement of a ring to the router."""


class TenantShares:
    """Shares of the tenants of one ring. A tenant that has asked alone lately may take all room."""

    def __init__(self, ring: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._asked: dict[str, float] = {}

    def note(self, tenant: str) -> None:
        """Note that a tenant asks for a turn; "" is no tenant."""
        now = self._clock()
        self._asked = {name: at for name, at in self._asked.items() if now - at < PRESENT_SECONDS}
        if tenant:
            self._asked[tenant] = now

    def check(
        self,
        unit: str,
        tenant: str,
        *,
        mine: float,
        asked: float,
        total: float,
        limit: float,
        retry: float | None = None,
    ) -> None:
        """Check that a tenant that has `mine` units may add `asked`.

        Raises CapacityExceeded, to `retry` in so many seconds.
        """
        if self._asked.keys() - {tenant} and exceeds_share(mine, asked, total, limit):
            raise CapacityExceeded(
                f"{self._ring}: tenant {tenant!r} has {mine:.0f} {unit} under way, this turn adds {asked:.0f}, and "
                f"part of the {limit:.0f} must stay free for other tenants; retry later",
                retry_after_seconds=retry,
            )

    def check_turns(
        self, request: Reserve, others: Iterable[Reserve], *, max_turns: int, kv_tokens: int, retry: float | None = None
    ) -> None:
        """Check that the ring may take a turn. Shares are not checked if it `has_begun`. Raises CapacityExceeded."""
        tenant, turns = request.tenant, list(others)
        self.note(tenant)
        if len(turns) >= max_turns:
            raise CapacityExceeded(
                f"{self._ring}: {len(turns)} turns are under way and at most {max_turns} are allowed; retry later",
                retry_after_seconds=retry,
            )
        if request.has_begun:
            return
        own = [turn.num_tokens for turn in turns if turn.tenant == tenant]
        total = sum(turn.num_tokens for turn in turns)
        self.check("turns", tenant, mine=len(own), asked=1, total=len(turns), limit=max_turns, retry=retry)
        asked = request.num_tokens
        self.check("KV tokens", tenant, mine=sum(own), asked=asked, total=total, limit=kv_tokens, retry=retry)


class RingLeader(ABC):
    """Ring owner, which announces its ring to the router. Subclasses own the turns.

    `layout_fallbacks` counts pieces of prefill steps that got another layout for lack of room, by that layout.
    """

    def __init__(
        self,
        settings: RingSettings,
        factory: RankFactory,
        peers: Peers,
        announce: Announce,
    ) -> None:
        self.settings = settings
        self.endpoint = ""
        self.metrics_endpoint = ""
        self.tracer: Tracer = NoTracer()
        self.ring = Ring(settings, factory, on_ready=self.on_ready, on_lost=self._ring_lost)
        self.kv_moves = KvMoves(self.ring, peers)
        self.shares = TenantShares(f"{settings.role} ring {settings.name}")
        self._announce = announce
        self._epoch = 0
        self._is_heard = True
        self.layout_fallbacks: Counter[str] = Counter()
        self.is_draining = False
        self.is_leaving = False
        self.has_left = asyncio.Event()
        self._leave_task: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._tasks = TaskSet(f"ring {settings.name}")
        self.spawn = self._tasks.spawn

    async def start(self, endpoint: str) -> None:
        """Bring the ring up and announce it as reachable at `endpoint` (HOST:PORT)."""
        self.endpoint = endpoint
        await self.ring.start()

    @property
    def step_budget(self) -> float:
        """Limit on the work units of a prefill step; 0 means the work of `chunk_tokens` tokens."""
        return self.settings.prefill_scheduling.step_budget

    @property
    def waiting_work(self) -> float:
        """Work units that wait or are being computed; prefill rings have them."""
        return 0.0

    @property
    def work_rate(self) -> float:
        """Work units a second in recent steps; 0 if the ring computes no prompts."""
        return 0.0

    def preparing_grammar(self, grammar: str) -> asyncio.Task[None]:
        """Start a task in which the ranks compile the grammar of an answer. It raises nothing.

        A turn waits for the task before it enters a step, so that the step does not wait for the grammar: with its
        first grammar a rank reads the tokenizer, which takes seconds if cores are busy.
        """
        return self.spawn(self._prepare_grammar(grammar))

    async def _prepare_grammar(self, grammar: str) -> None:
        try:
            await gather_first_error(port.prepare_grammar(grammar, GRAMMAR_SECONDS) for port in self.ring.ranks)
        except RingserveError as error:
            log.warning("ring %s could not prepare a grammar, so a step will wait: %s", self.settings.name, error)

    @abstractmethod
    async def measure(self, until_quiet: Callable[[], Awaitable[None]]) -> None:
        """Measure the ring's rates again, once nothing else starts on its machine.

        `until_quiet` is awaited before each part, which takes half a second at most.
        """

    @abstractmethod
    async def get_status(self) -> RingInfo:
        """Return the ring's state and load."""

    async def close(self) -> None:
        """End background work, kill the ranks. Idempotent."""
        await self._tasks.close()
        await self.kv_moves.close()
        await self.ring.close()

    async def on_ready(self) -> None:
        """Announce a ring that serves, for the first time or again.

        If the router does not answer, the call is repeated for the control timeout: one lost call fails no start.
        Raises Unavailable.
        """
        deadline = time.monotonic() + self.settings.control_timeout
        if self._announcing is None:
            self._announcing = self.spawn(self._stay_announced())
        while True:
            try:
                await self.announce()
                return
            except Unavailable as error:
                if time.monotonic() > deadline:
                    raise
                log.info("ring %s: announcement failed, repeating it: %s", self.settings.name, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def announce(self) -> int:
        """Register the ring's state with the router.

        Returns how many turns the router has or begins on the ring, plus how many conversations it has yet to move
        away. A router that has restarted gets the ring's inventory.
        """
        ring = self.ring
        registration = RingRegistration(
            role=self.settings.role,
            name=self.settings.name,
            endpoint=self.endpoint,
            incarnation=ring.incarnation,
            num_ranks=self.settings.num_ranks,
            tp=self.settings.ranks.tp,
            rates=ring.rates,
            capacity_tokens=ring.pool.capacity_tokens,
            chunk_tokens=self.settings.chunk_tokens,
            step_budget=self.step_budget,
            min_chunk_tokens=self.settings.prefill_scheduling.min_chunk_tokens,
            waiting_work=self.waiting_work,
            work_rate=self.work_rate,
            free_tokens=ring.pool.free_tokens,
            spare_tokens=ring.pool.spare_tokens,
            num_evictions=ring.pool.evictions.total(),
            max_batch=self.settings.ranks.max_batch if self.settings.role == "decode" else 0,
            max_direct_tokens=self.settings.max_direct_tokens if self.settings.role == "decode" else 0,
            max_direct_seconds=self.settings.max_direct_seconds if self.settings.role == "decode" else 0.0,
            is_draining=self.is_draining,
            is_leaving=self.is_leaving,
            is_rebuilding=ring.state is RingState.REBUILDING,
            failure=ring.failure,
        )
        answer = await self._announce(registration, KnownEpoch(epoch=self._epoch))
        if answer.epoch != self._epoch:
            epoch = answer.epoch
            log.info("ring %s tells the router of epoch %d what it holds", self.settings.name, epoch)
            inventory = RingInventory(sequences=ring.pool.inventory(), turns=self.turns_here())
            answer = await self._announce(registration, KnownEpoch(epoch=epoch, inventory=inventory))
            if answer.epoch == epoch:  # else the router has restarted again
                self._epoch = epoch
        return answer.running_turns

    def check_epoch(self, epoch: int) -> None:
        """Refuse a call of an earlier router than the one to which this ring is announced. Raises StaleIncarnation.

        Such a router hung while another took its place, and does not know of it yet. The epoch in the latest answer to
        an announcement counts, even if it is lower than before: then the router has a new journal.
        """
        if epoch < self._epoch:
            raise StaleIncarnation(
                f"ring {self.settings.name} is announced to the router of epoch {self._epoch}, which has replaced the "
                f"one of epoch {epoch}"
            )

    @abstractmethod
    def turns_here(self) -> tuple[TurnOnRing, ...]:
        """Return the turns that hold KV here, and ended turns of whose end the router has not been told."""

    async def _stay_announced(self) -> None:
        """Announce the ring at intervals, even while it is rebuilt: else the router would consider its leader dead."""
        while True:
            interval = self.settings.announce_interval
            await asyncio.sleep(interval if self._is_heard else min(interval, RETRY_SECONDS))
            if self.is_leaving or self.ring.state is RingState.CLOSED:
                return
            await self._try_announce()

    async def _try_announce(self) -> None:
        try:
            await self.announce()
        except RingserveError as error:
            if self._is_heard:
                log.warning("ring %s: announcement failed, retrying: %s", self.settings.name, error)
            self._is_heard = False
        else:
            self._is_heard = True

    async def _ring_lost(self, error: RingserveError) -> None:
        """End every turn, and tell the router at once that the ring is being rebuilt."""
        self.spawn(self._try_announce())
        await self.fail_all(error)

    # --- draining ----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def num_turns(self) -> int:
        """Number of turns that have not ended here, or whose last event no stream has read yet."""

    async def drain(self, seconds: float) -> None:
        """Take no new turns; leave when running turns have ended and retained KV has been moved, or after `seconds`.

        `has_left` is set when the ring has left. Returns when the router knows of the drain; turns that the router
        began before are served. Idempotent: the first `seconds` count.
        """
        if self._leave_task is None:
            log.info("ring %s drains", self.settings.name)
            self.is_draining = True
            self._leave_task = self.spawn(self._leave(seconds))
        await self.announce()

    async def undrain(self) -> None:
        """Take turns again. Raises Unavailable if the ring has left. Idempotent."""
        if self.is_leaving:
            raise Unavailable(f"ring {self.settings.name} is leaving; retry when it is gone")
        if self._leave_task is not None:
            self._leave_task.cancel()
            self._leave_task = None
        self.is_draining = False
        await self.announce()

    async def _leave(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._until_idle()
        except TimeoutError:
            log.warning(
                "ring %s leaves after %.1f s with %d running turns", self.settings.name, seconds, self.num_turns
            )
        self.is_leaving = True
        try:
            await self.announce()
        except RingserveError as error:
            log.warning("ring %s could not announce that it leaves: %s", self.settings.name, error)
        log.info("ring %s has drained", self.settings.name)
        self.has_left.set()

    async def _until_idle(self) -> None:
        """Wait until neither the router nor the ring has work here.

        The router may have chosen the ring for a turn that has not come yet, and may still move conversations away.
        """
        while True:
            try:
                coming = await self.announce()
            except RingserveError as error:
                log.warning("ring %s drains and could not announce itself: %s", self.settings.name, error)
                coming = 0
            if not coming and not self.num_turns:
                return
            await asyncio.sleep(self.settings.drain_interval)

    @abstractmethod
    async def fail_all(self, error: RingserveError) -> None:
        """End every turn with `error`. Do not wait for the ring's ranks, which may be dead."""

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        """Begin a sequence with KV that another retains here. Raises Busy, CapacityExceeded, Unavailable."""
        self.ring.require_ready()
        pool, incarnation, name = self.ring.pool, self.ring.incarnation, f"fork of {request.source_id}"
        sequence = pool.fork(request.source_id, request.kv_id, name, request.num_tokens)
        shards, num_retained = sequence.shards, 0
        try:
            await copy_blocks(self.ring, pool, sequence, incarnation)
            num_retained = shards.num_tokens
        finally:
            pool.settle(request.kv_id, name, num_retained)
        return ForkedKv(incarnation=incarnation, shards=shards.truncate(pool.num_retained(request.kv_id)))

    async def send_kv(self, request: SendKv) -> SentKv:
        """Send retained KV as `KvMoves.send` does. Raises NotFound, Busy, TransferError, Unavailable."""
        return await self.kv_moves.send(request)

    async def take_kv(self, request: TakeKv) -> TakenKv:
        """Fetch KV as `KvMoves.take` does. Raises CapacityExceeded, Busy, NotFound, TransferError, Unavailable."""
        return await self.kv_moves.take(request)

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        """Return the number of tokens retained of each sequence. Raises Unavailable."""
        self.ring.require_ready()
        retained = tuple(self.ring.pool.num_retained(kv_id) for kv_id in kv_ids)
        return RetainedKv(incarnation=self.ring.incarnation, num_tokens=retained)

    def status_with(self, *, running: int, waiting: int) -> RingInfo:
        """Return the ring's state with the numbers of running and waiting turns."""
        ring = self.ring
        return RingInfo(
            role=self.settings.role,
            name=self.settings.name,
            endpoint=self.endpoint,
            incarnation=ring.incarnation,
            state=ring.state,
            num_ranks=self.settings.num_ranks,
            tp=self.settings.ranks.tp,
            attention_backend=ring.infos[0].attention_backend if ring.infos else "",
            ring_transport=ring.infos[0].ring_transport if ring.infos else "",
            num_requests_running=running,
            num_requests_waiting=waiting,
            kv_usage=ring.pool.usage(),
            rebuilds=ring.rebuilds,
            rank_pids=tuple(info.pid for info in ring.infos),
            metrics_endpoint=self.metrics_endpoint,
            decode_variant=ring.decode_variant,
            decode_reason=ring.decode_reason,
            failure=ring.failure,
            draining=self.is_draining,
            nodes=ring.nodes,
        )

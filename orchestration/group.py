"""What leaders of prefill and decode rings have in common: the ring, its announcement, background tasks, status."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence

from cp_core.errors import RingserveError
from orchestration.block_copies import copy_blocks
from orchestration.ports import RankFactory
from orchestration.ring import GroupSettings, Ring
from orchestration.turn import ForkedKv, ForkKv, GroupRegistration, KeptKv
from orchestration.views import GroupStatus

log = logging.getLogger(__name__)


class GroupLeader(ABC):
    """One ring and its place in the service. Subclasses own the turns."""

    def __init__(
        self,
        settings: GroupSettings,
        factory: RankFactory,
        announce: Callable[[GroupRegistration], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.endpoint = ""
        self.metrics_endpoint = ""
        self.ring = Ring(settings, factory, on_ready=self.on_ready, on_lost=self.fail_all)
        self._announce = announce
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, endpoint: str) -> None:
        """Bring the ring up and announce it as reachable at `endpoint` (HOST:PORT)."""
        self.endpoint = endpoint
        await self.ring.start()

    @property
    def step_budget(self) -> float:
        """Work units of a prefill step at most; 0: those of `chunk_tokens` tokens."""
        return self.settings.prefill_scheduling.step_budget

    @property
    def waiting_work(self) -> float:
        """Work units that wait or are being computed; prefill rings have them."""
        return 0.0

    @property
    def work_rate(self) -> float:
        """Work units a second, of late; 0 where there are none."""
        return 0.0

    @abstractmethod
    async def measure(self) -> None:
        """Measure the ring's rates again, now that nothing else starts on its machine."""

    @abstractmethod
    async def get_status(self) -> GroupStatus:
        """How the ring is."""

    async def close(self) -> None:
        """End background work, kill the ranks. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ring.close()

    async def on_ready(self) -> None:
        """The ring serves, for the first time or again."""
        self.spawn(self._stay_announced(self.ring.incarnation))
        await self.announce()

    async def announce(self) -> None:
        """Tell the router what the ring is and does."""
        ring = self.ring
        registration = GroupRegistration(
            role=self.settings.role,
            name=self.settings.name,
            endpoint=self.endpoint,
            incarnation=ring.incarnation,
            num_ranks=self.settings.num_ranks,
            tp=self.settings.tp,
            rates=ring.rates,
            capacity_tokens=ring.pool.capacity_tokens,
            chunk_tokens=self.settings.chunk_tokens,
            step_budget=self.step_budget,
            min_chunk_tokens=self.settings.prefill_scheduling.min_chunk_tokens,
            waiting_work=self.waiting_work,
            work_rate=self.work_rate,
            free_tokens=ring.pool.free_tokens,
            max_batch=self.settings.max_batch if self.settings.role == "decode" else 0,
        )
        await self._announce(registration)

    async def _stay_announced(self, incarnation: str) -> None:
        """Tell the router again and again: it may have been restarted, or have taken one lost call for our end."""
        while True:
            await asyncio.sleep(self.settings.announce_interval)
            if not self.ring.is_serving(incarnation):
                return
            try:
                await self.announce()
            except RingserveError as error:
                log.warning("ring %s could not announce itself: %s", self.settings.name, error)

    @abstractmethod
    async def fail_all(self, error: RingserveError) -> None:
        """The ring is lost: end every turn with `error`, without waiting for its ranks."""

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run in the background; the leader keeps the task and logs what it raises."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work of %s failed", self.settings.name, exc_info=task.exception())

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        """Begin a sequence with KV that another keeps here. Raises Busy, CapacityExceeded, Unavailable."""
        self.ring.require_ready()
        pool, incarnation, name = self.ring.pool, self.ring.incarnation, f"fork of {request.source_id}"
        sequence = pool.fork(request.source_id, request.sequence_id, name, request.num_tokens)
        shards, keep = sequence.shards, 0
        try:
            await copy_blocks(self.ring, pool, sequence, incarnation)
            keep = shards.num_tokens
        finally:
            pool.settle(request.sequence_id, name, keep)
        return ForkedKv(incarnation=incarnation, shards=shards.truncate(pool.num_kept(request.sequence_id)))

    async def get_kept(self, sequence_ids: Sequence[str]) -> KeptKv:
        """What is still here of these sequences. Raises Unavailable."""
        self.ring.require_ready()
        kept = tuple(self.ring.pool.num_kept(sequence_id) for sequence_id in sequence_ids)
        return KeptKv(incarnation=self.ring.incarnation, num_tokens=kept)

    def status_with(self, *, running: int, waiting: int) -> GroupStatus:
        ring = self.ring
        return GroupStatus(
            role=self.settings.role,
            name=self.settings.name,
            endpoint=self.endpoint,
            incarnation=ring.incarnation,
            state=ring.state,
            num_ranks=self.settings.num_ranks,
            tp=self.settings.tp,
            attention_backend=ring.infos[0].attention_backend if ring.infos else "",
            ring_transport=ring.infos[0].ring_transport if ring.infos else "",
            num_requests_running=running,
            num_requests_waiting=waiting,
            kv_usage=ring.pool.usage(),
            rebuilds=ring.rebuilds,
            rank_pids=tuple(info.pid for info in ring.infos),
            metrics_endpoint=self.metrics_endpoint,
            decode_variant=ring.decode_variant,
        )

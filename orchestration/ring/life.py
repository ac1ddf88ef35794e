"""Life of one ring of ranks: start, watch, rebuild. The ring's leader owns it.

STARTING ──> READY ──a rank fails──> REBUILDING ──> READY ...        any ──close()──> CLOSED

When one rank fails, the KV of the others is useless, because attention needs the lost shards too, and they may wait in
a receive that never ends. So all living ranks leave the ring and form a new one, with the models that they have loaded.
Only lost ranks, and ranks that cannot leave in time, are killed and made anew. If that fails, all are made anew. The
ring gets a new *incarnation*, which makes every message of the old one stale.

In the same way a leader that starts takes over the ranks of one that died, and what that one had measured of them. So
they need not load the model again while other rings compute the lost turns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from ringserve.cp_core.cost.decode import GATHER
from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.protocol.ports import RankFactory, RankPort
from ringserve.orchestration.protocol.rings import RingSettings, RingState
from ringserve.orchestration.ring.kv_pool import KvPool
from ringserve.orchestration.ring.step_probe import Alone, StepCorrection, measure_steps, room_for_steps
from ringserve.orchestration.tasks import TaskSet, gather_all, gather_first_error
from ringserve.views import RingRates
from ringserve.workers.protocol.ranks import ModelInfo, RankInfo, RankSpec, RankStatus, RingSpec

log = logging.getLogger(__name__)

# Id of the sequence, and of the turn, for which the pool reserves the blocks of measured steps.
STEPS_KV = "measured steps"
MAX_RETRY_PAUSE = 30.0
"""Longest pause between attempts to rebuild, in seconds; each is twice the one before, up to this."""
RENEW_SECONDS = 10.0
"""Seconds that a rank may take to leave its ring, in addition to `lost_timeout`."""
SILENT_TICKS = 4
"""Ticks into which the wait for a rank's heartbeat is divided."""
LEAST_PATIENCE_CPU = 15.0
"""Least limit of a step on CPUs, in seconds.

A process that hangs is noticed by its silence, so this bounds steps that hang in a live one. A false alarm on a busy
machine costs a rebuild, a late alarm only seconds.
"""
LEAST_PATIENCE = 60.0
"""The same limit on other devices, where the first step of a shape compiles kernels."""


UNLIKE = 1.25
"""Ranks count as unlike if one is more than this many times as fast as another. Probes of equal ones differ by less."""


def rates_of_ring(rates: Sequence[RingRates], tp: int, processors: Sequence[str] | None = None) -> RingRates:
    """Return a ring's rates from its processes' rates. Of the `tp` processes of a rank the slowest counts.

    If all ranks are alike, the first process's rates are returned. Otherwise the slowest rank's, because all others
    wait for it; `speeds` then says how many times as fast each rank is. `processors` names the processor of each
    process; None if no two processes share one. Processes of one processor all get the rates of the slowest: their
    probes differ only because another program ran beside one of them, and soon it will run beside another.
    Example: two ranks of one host, probed at 4e10 and 2e10, are two alike at 2e10.
    """
    if processors is not None:
        probed = list(zip(processors, rates, strict=True))
        rates = [_slowest(other for place, other in probed if place == own) for own in processors]
    ranks = [_slowest(rates[at : at + tp]) for at in range(0, len(rates), tp)]
    slowest = _slowest(ranks)
    if max(each.gemm_flops for each in ranks) <= UNLIKE * slowest.gemm_flops:
        return rates[0]
    return replace(slowest, speeds=tuple(each.gemm_flops / slowest.gemm_flops for each in ranks))


def _slowest(rates: Iterable[RingRates]) -> RingRates:
    return min(rates, key=lambda each: each.gemm_flops)


@dataclass(frozen=True, slots=True)
class Measured:
    """A leader's measurements of a ring, with the host of each process. The first rank keeps them for the next leader.

    They hold as long as the processes are on these hosts, and are not repeated when the ring is formed again: the
    machine is then busy with the lost turns.
    """

    rates: RingRates
    correction: StepCorrection | None
    hosts: tuple[str, ...]


def _hosts(infos: Sequence[RankInfo]) -> tuple[str, ...]:
    return tuple(info.kv_endpoint.rpartition(":")[0].strip("[]") for info in infos)


class Ring:
    """Ranks of one ring, in `ranks` and `infos` by number (cp_rank * tp + tp_rank).

    `on_ready` is awaited each time the ring begins to serve, `on_lost` each time before it is rebuilt.
    """

    def __init__(
        self,
        settings: RingSettings,
        factory: RankFactory,
        *,
        on_ready: Callable[[], Awaitable[None]],
        on_lost: Callable[[RingserveError], Awaitable[None]],
    ) -> None:
        self.settings = settings
        self.state = RingState.STARTING
        self.incarnation = ""
        self.rebuilds = 0
        self.decode_variant = ""  # variant of the latest decode step that the watch saw
        self.decode_reason = ""
        self.failure = ""  # why the latest attempt to rebuild failed
        self.ranks: Sequence[RankPort] = ()
        self.infos: list[RankInfo] = []
        self.rank_statuses: dict[int, RankStatus] = {}
        self.rates = RingRates(gemm_flops=0, attention_flops=0, link_bytes_per_second=0, link_latency_seconds=0)
        self._correction: StepCorrection | None = None
        self.pool = KvPool(settings.num_ranks, 0, settings.ranks.block_tokens)
        self._gone: set[int] = set()  # ranks that did not answer the watch
        self._factory = factory
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._rebuilds = TaskSet(f"ring {settings.name}")
        self._watch: list[asyncio.Task[None]] = []

    @property
    def kv_endpoints(self) -> tuple[str, ...]:
        """Endpoints where the ranks receive KV, by number."""
        return tuple(info.kv_endpoint for info in self.infos)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of the ranks' nodes, provided that ranks listen at their node's address."""
        return tuple(dict.fromkeys(_hosts(self.infos)))

    @property
    def cp_ranks(self) -> Sequence[int]:
        """Index of the token share that each of `ranks` holds."""
        return [rank // self.settings.ranks.tp for rank in range(len(self.ranks))]

    @property
    def model(self) -> ModelInfo:
        """Model that the ranks have loaded."""
        return self.infos[0].model

    def is_serving(self, incarnation: str) -> bool:
        """Return whether the ring serves in that incarnation now."""
        return self.state is RingState.READY and incarnation == self.incarnation

    def require_ready(self, incarnation: str | None = None) -> None:
        """Raise Unavailable unless the ring serves (and, if given, is still that incarnation)."""
        if self.state is not RingState.READY:
            why = f": {self.failure}" if self.failure else ""
            raise Unavailable(f"ring {self.settings.name} is {self.state}{why}; retry in a few seconds")
        if incarnation is not None and incarnation != self.incarnation:
            raise Unavailable(f"ring {self.settings.name} was rebuilt during the turn; retry")

    async def start(self) -> None:
        """Take over the ranks that a dead leader left, or make them; wait until they serve.

        Raises the error that stopped a rank from starting, e.g. ModelRefused, after closing the ring.
        """
        try:
            if not await self._take_over():
                await self._build()
            await self._on_ready()
        except BaseException:
            await self.close()
            raise

    async def _take_over(self) -> bool:
        """Form a ring with the ranks that a dead leader left. Return False if there are none, or if they cannot."""
        settings = self.settings
        self.ranks = await self._factory.adopt(settings.num_processes)
        if not self.ranks:
            return False
        started = time.monotonic()
        try:
            measured = await self.ranks[0].recall(RENEW_SECONDS)
            if not isinstance(measured, Measured):
                raise Unavailable("the ring had not served yet")
            self._correction = measured.correction
            await self._renew(measured)
        except RingserveError as failure:
            log.warning("ranks of ring %s could not be taken over, new ones start: %s", settings.name, failure)
            await gather_all(rank.kill() for rank in self.ranks)
            await self._factory.close()
            self._correction = None
            return False
        log.info("ring %s was taken over in %.1f s", settings.name, time.monotonic() - started)
        return True

    async def _build(self) -> None:
        """Make all ranks, and let them form a ring."""
        settings, specs = self.settings, self._specs()
        ranks = await self._factory.create(settings.num_processes, settings.start_timeout)
        starts = zip(ranks, specs, strict=True)
        infos = await gather_first_error(rank.start(spec, settings.start_timeout) for rank, spec in starts)
        await self._join(ranks, infos, specs[0].incarnation)

    async def _renew(self, measured: Measured) -> None:
        """Let the living ranks form a new ring, with new ones in the places of lost ones. Raises Unavailable.

        Rates are measured again only if a rank is on another host than it was.
        """
        settings, specs = self.settings, self._specs()

        async def renewed(rank: RankPort, spec: RankSpec) -> RankInfo | None:
            if spec.rank in self._gone:
                return None
            try:
                return await rank.renew(spec, RENEW_SECONDS + settings.lost_timeout)
            except RingserveError as error:
                log.info("rank %d of ring %s is made anew: %s", spec.rank, settings.name, error)
                return None

        # A rank that sends to one that hangs cannot leave before the process of that one is dead.
        await gather_all(self.ranks[number].kill() for number in self._gone)
        kept = await gather_all(renewed(rank, spec) for rank, spec in zip(self.ranks, specs, strict=True))
        lost = [number for number, info in enumerate(kept) if info is None]
        if len(lost) == len(kept):
            raise Unavailable("no rank is left")
        ranks = await self._factory.replace(lost, settings.start_timeout)
        # If survivors have cut their weights for helix, new ranks must do so too; the cut does not depend on who the
        # others are.
        places = [spec.with_helix() for spec in specs] if any(info.is_helix for info in kept if info) else specs
        made = await gather_first_error(ranks[number].start(places[number], settings.start_timeout) for number in lost)
        by_number = dict(zip(lost, made, strict=True))
        infos = [info or by_number[number] for number, info in enumerate(kept)]
        known = measured.rates if measured.hosts == _hosts(infos) else None
        await self._join(ranks, infos, specs[0].incarnation, known)

    def _specs(self) -> list[RankSpec]:
        """Return the place of each process in a new incarnation."""
        incarnation = f"{self.settings.name}-{uuid.uuid4().hex[:12]}"
        return [self._spec(rank, incarnation) for rank in range(self.settings.num_processes)]

    async def _join(
        self, ranks: Sequence[RankPort], infos: list[RankInfo], incarnation: str, known: RingRates | None = None
    ) -> None:
        """Connect started ranks, measure them unless their rates are known, and serve."""
        settings = self.settings
        endpoints = await gather_first_error(rank.open_endpoints(settings.control_timeout) for rank in ranks)
        rendezvous = RingSpec(
            name=incarnation,
            endpoints=tuple(endpoints),
            secret=secrets.token_hex(32),
            timeout_seconds=settings.stuck_timeout,
        )
        await gather_first_error(rank.join(rendezvous, settings.start_timeout) for rank in ranks)
        sized = self._sized(infos)
        if known is None:
            probed = await gather_first_error(rank.probe(settings.start_timeout) for rank in ranks)
            common = self._common(probed, infos)
            if settings.measures_at_start and self._correction is None:
                self._correction = await measure_steps(ranks, sized, infos[0].model, common)
        rates = known or self._corrected(common)
        await self._have_kept(ranks[0], rates, infos)
        if self.state is RingState.CLOSED:
            raise Unavailable(f"ring {settings.name} was closed while it started")
        self.ranks, self.infos, self.incarnation = ranks, infos, incarnation
        self.rates = rates
        self.rank_statuses.clear()
        self._gone.clear()
        self.pool = KvPool(
            settings.num_ranks,
            sized.ranks.num_blocks,
            settings.ranks.block_tokens,
            kept_fraction=settings.kept_fraction,
        )
        log.info("%d tokens of KV fit on ring %s", self.pool.capacity_tokens, settings.name)
        self.state, self.failure = RingState.READY, ""
        self._watch = [
            asyncio.create_task(self._watch_rank(number, rank, incarnation)) for number, rank in enumerate(ranks)
        ]
        if settings.role == "decode":
            self._watch += [asyncio.create_task(self._watch_loop(rank, incarnation)) for rank in ranks]

    async def measure(self, alone: Alone = nullcontext) -> None:
        """Let the ranks measure their rates again, each part within `alone()`: turns may compute between two parts.

        Steps are measured again too, unless KV would have to be evicted for them.
        """
        self.require_ready()
        settings = self.settings
        async with alone():
            rates = await gather_first_error(rank.probe(settings.start_timeout) for rank in self.ranks)
        common = self._common(rates, self.infos)
        with self._room_for_steps() as tables:
            if tables is not None:
                sized = self._sized(self.infos)
                self._correction = await measure_steps(self.ranks, sized, self.model, common, tables, alone)
        self.rates = self._corrected(common)
        await self._have_kept(self.ranks[0], self.rates, self.infos)

    @contextmanager
    def _room_for_steps(self) -> Iterator[Sequence[Sequence[int]] | None]:
        """Reserve free blocks of each rank for steps that are measured; None if too few are free."""
        pool, held = self.pool, room_for_steps(self._sized(self.infos), self.model)
        if max(held) > min(rank.free_blocks for rank in pool.usage()) * pool.block_tokens:
            yield None
            return
        sequence = pool.pin(STEPS_KV, STEPS_KV, 0)
        try:
            pool.make_room(sequence, held)
            yield [sequence.table(rank) for rank in range(self.settings.num_ranks)]
        finally:
            pool.settle(STEPS_KV, STEPS_KV, 0)

    async def _have_kept(self, rank: RankPort, rates: RingRates, infos: Sequence[RankInfo]) -> None:
        await rank.remember(Measured(rates, self._correction, _hosts(infos)), self.settings.control_timeout)

    def _sized(self, infos: Sequence[RankInfo]) -> RingSettings:
        """Return the settings with the blocks that every rank has: free memory may have decided their number."""
        num_blocks = min(info.num_blocks for info in infos)
        return replace(self.settings, ranks=replace(self.settings.ranks, num_blocks=num_blocks))

    def _common(self, rates: Sequence[RingRates], infos: Sequence[RankInfo]) -> RingRates:
        """Return the ring's rates; CPU ranks of one host compute on one processor."""
        ranks = self.settings.ranks
        return rates_of_ring(rates, ranks.tp, _hosts(infos) if ranks.device == "cpu" else None)

    def _corrected(self, rates: RingRates) -> RingRates:
        """Return probed rates, corrected by the extra time that steps took before; a rebuild does not change it."""
        return rates if self._correction is None else self._correction.applied(rates)

    async def measure_between_steps(self) -> None:
        """Measure the rates of a ring whose ranks run their decode loop."""
        self.require_ready()
        self.rates = self._corrected(await self.ranks[0].probe_between_steps(self.settings.start_timeout))
        await self._have_kept(self.ranks[0], self.rates, self.infos)

    def _spec(self, rank: int, incarnation: str) -> RankSpec:
        settings = self.settings
        return RankSpec(
            ring=settings.name,
            rank=rank,
            num_ranks=settings.num_processes,
            incarnation=incarnation,
            # A prefill ring does not decode. Its ranks compute different rows, so they cannot share weights as helix
            # does.
            settings=settings.ranks if settings.role == "decode" else replace(settings.ranks, decode_variant=GATHER),
        )

    async def _watch_rank(self, number: int, rank: RankPort, incarnation: str) -> None:
        """Report the ring lost when a rank does not answer or has been in one step for too long."""
        while True:
            try:
                status = await self._sign_of_life(number, rank)
            except RingserveError as error:
                self._gone.add(number)
                self.report_lost(error, incarnation)
                return
            self.rank_statuses[number] = status
            self.decode_variant = status.decode_variant or self.decode_variant
            self.decode_reason = status.decode_reason or self.decode_reason
            if status.running and status.seconds_since_step > self._longest_step:
                stuck = f"a rank of {self.settings.name} made no step for {status.seconds_since_step:.0f} s"
                self.report_lost(Unavailable(stuck), incarnation)
                return
            await asyncio.sleep(self.settings.watch_interval)

    async def _sign_of_life(self, number: int, rank: RankPort) -> RankStatus:
        """Ask a rank for its status. Raises Unavailable if the rank has been silent for the lost timeout.

        The wait is counted in ticks: if the leader itself hangs, that counts as one tick, not as the rank's silence.
        The wait is shorter than the lost timeout by half a watch interval: for so long, on average, a dead rank has
        been silent when it is asked.
        """
        settings = self.settings
        patience = settings.lost_timeout - min(settings.watch_interval, settings.lost_timeout) / 2
        asking = asyncio.ensure_future(rank.status(settings.stuck_timeout))
        try:
            for _ in range(SILENT_TICKS):
                if (await asyncio.wait([asking], timeout=patience / SILENT_TICKS))[0]:
                    return asking.result()
        finally:
            asking.cancel()
        raise Unavailable(f"rank {number} of ring {settings.name} sent no heartbeat for {settings.lost_timeout:g} s")

    @property
    def _longest_step(self) -> float:
        """Seconds that a step may take. For a prefill step they depend on its length: `PrefillLoop` watches it."""
        settings = self.settings
        return settings.step_timeout if settings.role == "prefill" else min(settings.step_timeout, self.least_patience)

    @property
    def least_patience(self) -> float:
        """Seconds that every step may take, however short it is predicted to be."""
        return LEAST_PATIENCE_CPU if self.settings.ranks.device == "cpu" else LEAST_PATIENCE

    async def _watch_loop(self, rank: RankPort, incarnation: str) -> None:
        try:
            await rank.run_decode()
        except RingserveError as error:
            self.report_lost(error, incarnation)
        else:
            self.report_lost(Unavailable(f"a decode loop of {self.settings.name} ended"), incarnation)

    def report_lost(self, error: Exception, incarnation: str) -> None:
        """Rebuild the ring. Only the first report about an incarnation counts."""
        if self.state is not RingState.READY or incarnation != self.incarnation:
            return
        self.state = RingState.REBUILDING
        log.warning("ring %s is lost and will be rebuilt: %s", self.settings.name, error)
        self._rebuilds.spawn(self._rebuild(error))

    async def _rebuild(self, error: Exception) -> None:
        started = time.monotonic()
        await self._end_watch()
        await self._on_lost(Unavailable(f"ring {self.settings.name} lost a rank and is being rebuilt: {error}"))
        if not await self._build_until_ready():
            return
        self.rebuilds += 1
        log.info("ring %s rebuilt in %.1f s", self.settings.name, time.monotonic() - started)
        # If a rank is lost from here on, another rebuild starts in another task.
        try:
            await self._on_ready()
        except RingserveError as failure:
            log.warning("ring %s is rebuilt and could not announce itself: %s", self.settings.name, failure)

    async def _build_until_ready(self) -> bool:
        """Rebuild until the ring serves; return False if it was closed meanwhile."""
        pause = self.settings.retry_pause
        try:
            await self._renew(Measured(self.rates, self._correction, _hosts(self.infos)))
            return True
        except Exception as failure:  # of any kind: else the ring would never serve again
            log.warning("ring %s is made anew as a whole: %s", self.settings.name, failure)
        while self.state is RingState.REBUILDING:
            await gather_all(rank.kill() for rank in self.ranks)
            await self._factory.close()
            try:
                await self._build()
            except Exception as failure:  # of any kind: without another attempt the ring would never serve again
                self.failure = str(failure)
                trace = None if isinstance(failure, RingserveError) else failure
                log.warning(
                    "rebuilding ring %s failed, trying again in %.1f s: %s",
                    self.settings.name,
                    pause,
                    failure,
                    exc_info=trace,
                )
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_PAUSE)
            else:
                return True
        return False

    async def _end_watch(self) -> None:
        current = asyncio.current_task()
        watchers = [task for task in self._watch if task is not current]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    async def close(self) -> None:
        """Kill the ranks and free their places. Idempotent."""
        self.state = RingState.CLOSED
        await self._end_watch()
        await self._rebuilds.close()
        await gather_all(rank.kill() for rank in self.ranks)
        await self._factory.close()

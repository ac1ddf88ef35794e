"""What runs in an actor: the router or a leader with its gRPC server, built by `cluster.hosts`.

Each owns its servers; the router also owns its journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import ray
from prometheus_client.registry import Collector

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.placement.scaling import ScalingSettings
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.ports import RouterPort
from ringserve.orchestration.protocol.rings import RingEvent
from ringserve.orchestration.protocol.views import ring_fault
from ringserve.orchestration.ring.actors import RayRanks
from ringserve.orchestration.ring.leader import RingLeader
from ringserve.orchestration.router.router import Router, RouterSettings
from ringserve.services.auth.tls import peer_server
from ringserve.services.cluster.garbage import FrozenSurvivors
from ringserve.services.cluster.hosts import LeaderHost, RouterHost
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import EPOCH_KEY, GrpcServer, HealthWatch, make_peer_check
from ringserve.services.rpc.servicers import DecodeServicer, PrefillServicer, RouterServicer
from ringserve.services.telemetry.logs import set_up_logs
from ringserve.services.telemetry.metrics.endpoint import MetricsEndpoint, metrics_page, probe_pages
from ringserve.services.telemetry.metrics.registry import RING_NAMES, WithVllmNames, new_registry
from ringserve.services.telemetry.metrics.ring import RingCollector, view_of
from ringserve.services.telemetry.metrics.router import RouterMetrics, RouterView
from ringserve.services.telemetry.tracing import make_tracer

STOP_GRACE_SECONDS = 2.0
QUIET_SECONDS, MOST_QUIET_SECONDS, QUIET_LOOK_SECONDS = 30.0, 600.0, 1.0
"""Seconds that a measurement waits for turns to end if the ring has its own cores, and if it shares them; seconds
between two looks."""
RETURN_SECONDS = 30.0
"""Seconds that the router waits for a ring beyond the start timeout: its former leader must end first."""


def reachable(address: str) -> str:
    """Return the address by which others reach a server on HOST:PORT; for every interface, this node's address."""
    host, _, port = address.rpartition(":")
    if host in ("0.0.0.0", "[::]"):
        return f"{ray.util.get_node_ip_address()}:{port}"
    return address


async def until_quiet(
    router: RouterPort, deadline: float, interval: float = QUIET_LOOK_SECONDS, *, is_needed: bool = False
) -> None:
    """Return once no turn of the service runs, or at the `deadline` of the monotonic clock.

    Once a turn was seen, two looks in a row must find none: between two turns of one client there is a moment without
    any, and the second turn would wait for the measurement. With `is_needed`, raises Unavailable at the deadline.
    """
    quiet_looks_left = 1
    while time.monotonic() < deadline:
        try:
            runs = (await router.get_server_info()).running_turns > 0
        except RingserveError:  # without a router no turn runs
            return
        quiet_looks_left = 2 if runs else quiet_looks_left - 1
        if not quiet_looks_left:
            return
        await asyncio.sleep(interval)
    if is_needed:
        raise Unavailable("turns ran without a pause, and rates that are measured beside them would be wrong")


def quiet_moments(
    router: RouterPort, *, is_shared: bool, interval: float = QUIET_LOOK_SECONDS
) -> Callable[[], Awaitable[None]]:
    """Return the wait before each part of a measurement, for cores that rings share or not.

    All parts come within QUIET_SECONDS after the first one, since the ring holds blocks for them meanwhile.
    """
    deadline = time.monotonic() + (MOST_QUIET_SECONDS if is_shared else QUIET_SECONDS)

    async def wait() -> None:
        nonlocal deadline
        await until_quiet(router, deadline, interval, is_needed=is_shared)
        deadline = min(deadline, time.monotonic() + QUIET_SECONDS)

    return wait


class RunningRouter:
    """Router with its gRPC server."""

    def __init__(self, host: RouterHost) -> None:
        set_up_logs("router", host.config.logs.level, host.config.logs.format, host.config.logs.levels)
        self._config = host.config
        self._tls = host.config.internal_tls.files
        journal = SqliteJournal(Path(host.journal), host.fingerprint) if host.journal else None
        self._peers = GrpcPeers(self._tls, host.config.timeouts.lost)
        router = host.config.router
        self._planner = Planner(
            host.model,
            PlannerSettings(
                selector=router.selector,
                profile=host.profile,
                missing_kv=router.missing_kv,
            ),
        )
        settings = RouterSettings(
            max_conversations=router.max_conversations,
            conversation_ttl=router.conversation_ttl_seconds,
            max_waiting_turns=router.max_waiting_turns,
            control_timeout=host.config.timeouts.control,
            transfer_timeout=host.config.timeouts.transfer,
            retain_prompts=router.retain_prompts,
            share_prompts=router.communities,
            max_positions=host.model.max_positions,
            return_seconds=host.config.timeouts.start + RETURN_SECONDS,
            ring_lease=host.config.timeouts.lost,
            num_rings=sum(pool.rings for pool in host.config.pools),
            sparse_losses=host.sparse_losses,
            bound=router.bound,
            least_rings=host.config.least_rings,
            scaling=ScalingSettings(
                busy_share=router.scale_busy_share,
                max_wait=router.scale_wait_seconds,
                shrink_seconds=router.scale_down_seconds,
            ),
        )
        self._survivors = FrozenSurvivors()
        with self._survivors.loading():
            self._router = Router(settings, self._planner, self._peers, journal=journal)
        self._peers.epoch = journal.epoch if journal else 0
        self._server: GrpcServer | None = None
        self._metrics: MetricsEndpoint | None = None

    async def start(self) -> str:
        self._server = GrpcServer(peer_server(self._tls), admit=make_peer_check())
        metrics = RouterMetrics(self._config.router.selector, self._view, asyncio.get_running_loop())
        servicer = RouterServicer(self._router, metrics)
        if self._config.metrics.router:
            pages = {"/metrics": metrics_page(metrics.registry), **probe_pages(str, asyncio.get_running_loop())}
            self._metrics = MetricsEndpoint("metrics.router", self._config.metrics.router, pages)
            servicer.metrics_endpoint = reachable(self._metrics.address)
        servicer.register(self._server)
        self._router.restore()
        return reachable(await self._server.start(self._config.router.listen))

    def _view(self) -> RouterView:
        pools = self._config.pools
        names = {(pool.role, pool.ring_name(number)): None for pool in pools for number in range(pool.rings)}
        names |= {(ring.role, ring.name): None for ring in self._router.rings}
        corrections = (
            (ring.name, each.algorithm, each.min_work, each.factor)
            for ring in self._router.rings
            for each in self._planner.corrections.of_ring(ring.registration)
        )
        return RouterView(
            conversations=self._router.num_conversations,
            unnamed_conversations=self._router.num_unnamed,
            prefix_tokens=self._router.prefix_tokens,
            running_turns=self._router.num_running,
            turns_waiting_for_rings=self._router.num_waiting_for_rings,
            rings=tuple((role, name, self._router.standing_of_ring(name)) for role, name in names),
            corrections=tuple(corrections),
            moves=self._router.moves,
        )

    async def measure(self) -> None:
        """Do nothing: a router has nothing to measure. Its answer tells that it lives."""

    async def wait_event(self) -> RingEvent:
        """Wait for a ring that has left and is to be started again, or whose leader is silent."""
        return await self._router.next_return()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(STOP_GRACE_SECONDS)
        await _close(self._metrics)
        await self._router.close()
        await self._peers.close()
        self._survivors.close()


class RunningLeader:
    """Leader with its gRPC server, announcing its ring to the router for as long as it serves."""

    def __init__(self, host: LeaderHost) -> None:
        set_up_logs(host.name, (logs := host.config.logs).level, logs.format, logs.levels, ring=host.name)
        self._host = host
        self._tls = host.config.internal_tls.files
        self._peers = GrpcPeers(self._tls, host.config.timeouts.lost)
        self._check_secret = make_peer_check()
        self._server: GrpcServer | None = None
        self._servicer: PrefillServicer | None = None
        self._leader: RingLeader | None = None
        self._tracer = make_tracer(host.config.tracing.endpoint, host.config.tracing.sample_ratio, host.name)
        self._drained = asyncio.Event()
        self._health: HealthWatch | None = None
        self._metrics: MetricsEndpoint | None = None

    async def start(self) -> str:
        """Start the server, then the ring, which announces the server's endpoint to the router."""
        host = self._host
        server = self._server = GrpcServer(peer_server(self._tls), admit=self._admit)
        router = self._peers.router(host.router_endpoint)
        ranks = RayRanks(host.name, host.resources(), host.pool.tp)
        leader: RingLeader
        if host.role == "prefill":
            leader = prefill = PrefillLeader(host.settings(), ranks, self._peers, router.register_ring)
            servicer = PrefillServicer(prefill)
        else:
            leader = decode = DecodeLeader(host.settings(), ranks, self._peers, router, router.register_ring)
            servicer = DecodeServicer(decode, host.config.timeouts.heartbeat)
        servicer.register(server)
        self._servicer = servicer
        leader.tracer = self._tracer
        leader.has_left = self._drained  # `wait_event` may wait for this event already
        self._leader = leader
        endpoint = await server.start(f"{host.listen_host or ray.util.get_node_ip_address()}:0", is_serving=False)
        try:
            self._serve_metrics(leader)
            await leader.start(endpoint)
            self._health = HealthWatch(f"ring {host.name}", server, self._fault)
            await self._health.look()
            self._health.start()
        except BaseException:
            await server.stop(0)
            await _close(self._metrics)
            raise
        return endpoint

    def _admit(self, metadata: Mapping[str, str]) -> None:
        """Refuse strangers, and a router that another has replaced. Raises Unauthenticated, StaleIncarnation."""
        self._check_secret(metadata)
        epoch = metadata.get(EPOCH_KEY, "")
        if self._leader is not None and epoch.isdecimal():
            self._leader.check_epoch(int(epoch))

    async def _fault(self) -> str:
        """Return why the ring does not serve, or nothing."""
        assert self._leader is not None, "the leader has started"
        ranks, stuck = self._leader.ring.rank_statuses.values(), self._leader.settings.stuck_timeout
        return ring_fault(await self._leader.get_status(), ranks, stuck)

    def _serve_metrics(self, leader: RingLeader) -> None:
        """Serve metrics before the ring starts: a ring that cannot start is seen as not ready, and not as missing."""
        host, address = self._host, self._host.metrics_address()
        if not address:
            return
        registry = new_registry(host.role)
        loop = asyncio.get_running_loop()
        registry.register(RingCollector(host.role, host.name, partial(view_of, leader), loop))
        shown: Collector = registry
        if host.config.metrics.also_as == "vllm":
            shown = WithVllmNames(registry.collect, RING_NAMES, Path(host.model_path).name)
        probes = probe_pages(lambda: self._health.fault if self._health else "it starts", loop)
        self._metrics = MetricsEndpoint(f"metrics.{host.role}", address, {"/metrics": metrics_page(shown), **probes})
        leader.metrics_endpoint = reachable(self._metrics.address)

    async def measure(self) -> None:
        """Measure the ring while no turn of the service runs, since each disturbs the other, or after QUIET_SECONDS.

        On cores that rings share, it raises Unavailable instead after MOST_QUIET_SECONDS.
        """
        assert self._leader is not None, "the leader has started"
        router = self._peers.router(self._host.router_endpoint)
        await self._leader.measure(quiet_moments(router, is_shared=bool(self._host.shared_cores)))

    async def wait_event(self) -> RingEvent:
        """Wait until the ring has drained: it is then stopped, and stays away."""
        await self._drained.wait()
        return RingEvent(ring=self._host.name)

    async def stop(self) -> None:
        if self._health is not None:
            await self._health.close()
        if self._servicer is not None:
            self._servicer.end_idle()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_SECONDS)
        if self._leader is not None:
            await self._leader.close()
        await _close(self._metrics)
        await asyncio.to_thread(self._tracer.close)
        with contextlib.suppress(asyncio.CancelledError):
            await self._peers.close()


async def _close(endpoint: MetricsEndpoint | None) -> None:
    if endpoint is not None:
        await asyncio.to_thread(endpoint.close)

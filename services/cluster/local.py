"""Cluster that `ringserve up` runs: router, rings and perhaps a gateway, on a Ray that it starts or on a Ray cluster.

It ends only what it started, also after a failure: Ray by its driver, the gateway by its process.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util import list_named_actors

from ringserve.cp_core.cost.decode import HELIX
from ringserve.cp_core.errors import ConfigError, ModelRefused, RingserveError, Unavailable
from ringserve.orchestration.ring.actors import free_places, free_places_of_others
from ringserve.services.cluster.capacity import (
    SpareSchedule,
    carrier_advice,
    check_fits,
    check_programs,
    dtype_advice,
    this_machine,
)
from ringserve.services.cluster.gateway import GatewayKeeper
from ringserve.services.cluster.hosts import LeaderHost, RouterHost
from ringserve.services.cluster.leaders import RayLeader, RingKeeper, is_node_alive
from ringserve.services.cluster.operator import RouterAccess, drain_all
from ringserve.services.cluster.ray_guard import (
    InstalledCode,
    check_guarded,
    end_left_behind,
    families,
    find_ended,
    make_secret,
    reason_of,
    start_own_ray,
    tame_output,
)
from ringserve.services.cluster.router import RayRouter, RouterKeeper
from ringserve.services.cluster.state import RayDirectory, can_fork, clear_abandoned
from ringserve.services.cluster.stopping import check_stop, keeping_handlers, run_until_set
from ringserve.services.config import Config
from ringserve.services.config.files import router_losses, router_profile
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.telemetry.tracing import check_installed
from ringserve.workers.model.builtin import PREFIX, resolve_model_path
from ringserve.workers.model.info import multiplies_bfloat16, read_fingerprint, read_model_info, tensor_share
from ringserve.workers.model.tokenizer import check_same_tokens
from ringserve.workers.protocol.ranks import ModelInfo

log = logging.getLogger(__name__)

MEASURED: Future[None] = Future()
"""Done future: no measurement is under way."""
MEASURED.set_result(None)

ACTORS_STOP_SECONDS = 10.0
RAY_LOOK_SECONDS = 0.2
"""Seconds of one wait for actors that stop, between two looks at Ray's own processes."""
POLL_SECONDS = 0.2
MEASURE_SECONDS = 10.0
"""Maximum seconds that `start` waits for its rings' measurement, which waits while turns run. `watch` does the rest."""
RAY_SECONDS = 1.0
"""Seconds between two looks at Ray's own processes."""
JOIN_SECONDS = 1.0
"""Seconds between two attempts to join a Ray cluster."""
PREDECESSOR_SECONDS = 75.0
"""Seconds within which actors of an earlier cluster of that name must end: Ray notices a lost node after 4 to 60 s."""
SLOW_START_SECONDS = 25.0
"""A start of Ray that fails after this time failed on a busy machine (Ray waits 30 s for its own processes), and is
tried again. A start that fails sooner would fail again."""


def read_draft_model(config: Config, path: Path) -> ModelInfo | None:
    """Return the shape of the model that drafts for the one in `path`; None if none does. Raises ConfigError."""
    if not config.decode.draft_model or config.decode.drafts == "off":
        return None
    try:
        draft_path = resolve_model_path(config.decode.draft_model)
        info = read_model_info(draft_path, dtype=config.model.dtype, device=config.model.device)
        check_same_tokens(path, draft_path, "decode.draft_model")
    except ModelRefused as error:
        raise ConfigError(f"decode.draft_model: {error}") from error
    return info


class LocalCluster:
    """Local cluster: `start`, then `watch`, both until `stopped` is set, then perhaps `drain`, then `stop`.

    `progress` gets one line for each stage. A gateway that is told to end lets its turns go on for `drain_seconds`.
    With `config.ray.address` the cluster runs on that Ray cluster, which it leaves as it was. Router and leaders run on
    the node of this process, where gateways and Prometheus find them. What the router is to remember after its death
    is in the directory `journal`; empty: nothing.

    On a Ray cluster `name` says whose ranks these are. A cluster that ends with `leaves_ranks`, or dies, leaves its
    ranks for the next of that name, which need not load the model again; see LEASE_SECONDS in
    `orchestration.ring.actors`.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[str], None] = lambda line: None,
        stopped: threading.Event | None = None,
        *,
        with_gateway: bool = True,
        drain_seconds: float = 0.0,
        journal: str = "",
        name: str = "default",
        leaves_ranks: bool = False,
        note_trouble: Callable[[str], None] = lambda reason: None,
        directory: RayDirectory | None = None,
    ) -> None:
        """`note_trouble` gets the reason why a cluster that has started does not serve, and "" when it does again.

        If a `directory` is given, its fork server may already load what workers need. The cluster removes the
        directory.
        """
        self._config = config
        self._journal = journal
        self._progress = progress
        self._note_trouble = note_trouble
        self._with_gateway = with_gateway
        self._drain_seconds = drain_seconds
        self._stopped = stopped or threading.Event()
        self._name = name
        self._leaves_ranks = leaves_ranks and bool(config.ray.address)
        # The id keeps names of actors apart from those of a cluster that has just ended: Ray may free them late.
        self._id = uuid.uuid4().hex[:8]
        self._namespace = f"ringserve-{name if config.ray.address else self._id}"
        # Other children of this process, such as the resource tracker of multiprocessing, are not ended with Ray.
        self._own_ray: list[psutil.Process] = []
        self._directory = directory or RayDirectory()
        self._rings = RingKeeper(lambda host, title: RayLeader(host, self._unique(title)), is_node_alive)
        self._router: RouterKeeper | None = None
        self._gateway: GatewayKeeper | None = None
        self._unmeasured: deque[RayLeader] = deque()
        self._measured = MEASURED  # measurement of one ring, the latest
        self.rings_serving = 0
        self.router_endpoint = ""

    def start(self) -> None:
        """Start everything, and return when the first request can be served.

        Raises ConfigError, ModelRefused, Unavailable; StopRequest if a stop was asked for meanwhile.
        """
        try:
            self._start()
        except (OSError, RayError, RingserveError) as error:
            # Ctrl-C in a terminal reaches Ray's processes too: errors about those that have ended are no errors then.
            if self._stopped.is_set():
                log.info("the start ends: %s", reason_of(error))
            check_stop(self._stopped)
            raise

    def _start(self) -> None:
        config = self._config
        path = resolve_model_path(config.model.path)
        name = Path(config.model.path).name
        model = read_model_info(path, dtype=config.model.dtype, name=name, device=config.model.device)
        fingerprint = read_fingerprint(path)
        for pool in config.pools:
            tensor_share(model, pool.tp, f"{pool.key}.tp")
        if config.decode.variant == HELIX and model.has_sinks:
            raise ConfigError(f"decode.variant: helix is not allowed for {name}, which has attention sinks")
        draft = read_draft_model(config, path)
        if not config.ray.address:
            check_fits(config, model, this_machine(), draft)
            check_programs(config)
            for advice in (
                dtype_advice(config.model, model, can_multiply=multiplies_bfloat16()),
                carrier_advice(config),
            ):
                if advice:
                    self._progress(advice)
        profile, losses = router_profile(config.router), router_losses(config)
        config.check_files()
        check_installed(config.tracing.endpoint)
        if self._with_gateway:
            _check_free({f"gateway.{key}": getattr(config.gateway, key) for key in ("listen", "http", "metrics")})
        if not config.ray.address:
            make_secret()  # for the gateway, too
        if self._with_gateway:
            self._gateway = GatewayKeeper(
                self._gateway_settings(path),
                start_seconds=config.timeouts.start,
                silent_seconds=config.timeouts.lost,
                spares=SpareSchedule(has_spare=config.gateway.spare),
            )
            # It loads for two seconds, on a core that Ray's start leaves idle.
            self._gateway.load()
        if config.ray.address:
            self._progress(f"joining the Ray cluster at {config.ray.address}")
            self._join_ray()
        else:
            self._progress("starting Ray")
            self._start_ray()
        self._progress("starting the router")
        router_host = RouterHost(
            config=config,
            model=model,
            fingerprint=fingerprint,
            profile=profile,
            journal=self._journal,
            sparse_losses=losses,
        )
        # With a journal, to start a router again costs no turn.
        silent = config.timeouts.lost if self._journal else config.timeouts.stuck
        self._router = RouterKeeper(
            router_host,
            lambda host, title: RayRouter(host, self._unique(title)),
            start_seconds=config.timeouts.start,
            silent_seconds=silent,
            # With a fork server there is no spare: a fork serves as soon as a spare would.
            spares=SpareSchedule(has_spare=config.router.spare and self._directory.forks is None),
        )
        router = self._router.process
        assert isinstance(router, RayRouter), "just made"
        self.router_endpoint = self._result(router.serves)
        self._router.serves_at(self.router_endpoint)
        hosts = [
            LeaderHost(
                config=config,
                # Each rank looks for a built-in model in its own machine's cache.
                model_path=config.model.path if config.model.path.startswith(PREFIX) else str(path),
                fingerprint=fingerprint,
                pool=pool,
                number=number,
                router_endpoint=self.router_endpoint,
                listen_host="" if config.ray.address else "127.0.0.1",
                # Prefill rings are measured below, decode rings at their start: not once their loop runs.
                measures_at_start=pool.role == "decode",
            )
            for pool in config.pools
            for number in range(pool.rings)
        ]
        self._progress(f"starting {len(hosts)} rings{' and a gateway' if self._with_gateway else ''}")
        if self._gateway is not None:
            self._gateway.start(self.router_endpoint)
        for host in hosts:
            self._rings.make(host)
        for leader in self._rings.leaders:
            self._result(leader.serves)
            self.rings_serving += 1
            self._progress(f"ring {leader.host.name} serves")
        if self._gateway is not None:
            self._gateway.await_serving()
            scheme = "https" if config.tls.files else "http"
            http = f", HTTP at {scheme}://{self.http_address}/v1" if self.http_address else ""
            self._progress(f"gateway serves at {self.gateway_address}{http}")
        # Not while the others start: rates measured on a busy machine would mislead the plans.
        self._unmeasured.extend(self._rings.leaders)
        deadline = time.monotonic() + MEASURE_SECONDS
        while self._measure_next() and time.monotonic() < deadline:
            wait([self._measured], POLL_SECONDS)
            check_stop(self._stopped)

    def _measure_next(self) -> bool:
        """If the last measurement is over, let the next ring measure itself. Return whether any still measures.

        A ring that fails meanwhile keeps what it measured at its start, or measures itself when it is started again.
        """
        while self._measured.done():
            if (error := self._measured.exception()) is not None:
                log.warning("a ring could not be measured, and its plans may be worse: %s", reason_of(error))
            if not self._unmeasured:
                self._measured = MEASURED
                return False
            self._measured = self._unmeasured.popleft().actor.measure.remote().future()
        return True

    def _start_ray(self) -> None:
        clear_abandoned()
        needed = sum(pool.num_threads for pool in self._config.pools)
        deadline = time.monotonic() + self._config.timeouts.start
        while True:
            began = time.monotonic()
            if can_fork(self._config):
                self._directory.start_forks()
            forks = self._directory.forks
            # Only Ray's log monitor knows which process wrote a line that is no JSON, such as a library's.
            is_forwarding = forks is None or self._config.logs.format == "json"
            try:
                directory = self._directory.path / "r"
                self._own_ray = start_own_ray(
                    max(1, needed), self._namespace, directory, forks, is_forwarding=is_forwarding
                )
                return
            except Unavailable as error:
                now = time.monotonic()
                if now - began < SLOW_START_SECONDS or now > deadline:
                    raise
                log.warning("%s; starting it again", error)
            self._directory.end_forks()
            check_stop(self._stopped)

    def _join_ray(self) -> None:
        """Join a Ray cluster, which may still be starting: it has the start timeout.

        Raises Unavailable, ConfigError.
        """
        tame_output()
        address, deadline = self._config.ray.address, time.monotonic() + self._config.timeouts.start
        while True:
            try:
                with keeping_handlers():
                    ray.init(
                        address=address,
                        namespace=self._namespace,
                        job_config=InstalledCode(),
                        logging_level=logging.WARNING,
                    )
                break
            except (ConnectionError, RuntimeError, ValueError) as error:
                if ray.is_initialized():
                    ray.shutdown()
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"ray.address: the Ray cluster at {address} cannot be joined: {reason_of(error)}"
                    ) from error
            self._stopped.wait(JOIN_SECONDS)
            check_stop(self._stopped)
        check_guarded(ray.get_runtime_context().gcs_address, is_insecure=self._config.internal_tls.insecure)
        self._await_predecessor()
        free_places_of_others([pool.ring_name(number) for pool in self._config.pools for number in range(pool.rings)])

    def _unique(self, title: str) -> str:
        """Return a name for an actor that no other cluster of this name gives."""
        return f"{title}-{self._id}"

    def _await_predecessor(self) -> None:
        """Wait until the router and the leaders of a cluster of this name have ended. Raises ConfigError if they run.

        They end with the process that started them. Ray may take some seconds to notice that their node has gone.
        """
        deadline, is_told = time.monotonic() + PREDECESSOR_SECONDS, False
        while others := [name for name in list_named_actors() if "/" not in name]:
            if not is_told:
                self._progress(f"waiting for another cluster called {self._name!r} to end")
                is_told = True
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"--name: a cluster called {self._name!r} runs on this Ray cluster ({', '.join(sorted(others))}); "
                    f"end it, or give this one another name"
                )
            self._stopped.wait(JOIN_SECONDS)
            check_stop(self._stopped)

    def _result(self, reference: Any) -> Any:
        timeout = self._config.timeouts.start + self._config.timeouts.control
        deadline = time.monotonic() + timeout
        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            check_stop(self._stopped)
            if time.monotonic() > deadline:
                raise Unavailable(f"the cluster did not start within {timeout:.0f} s")
        check_stop(self._stopped)
        try:
            return ray.get(reference)
        except RayTaskError as error:
            if isinstance(error.cause, RingserveError):
                raise error.cause from None
            raise Unavailable(f"the cluster did not start: {error.cause}") from error
        except RayError as error:
            raise Unavailable(f"the cluster did not start: {error}") from error

    def _gateway_settings(self, model_path: Path) -> GatewaySettings:
        config = self._config
        return GatewaySettings(
            listen=config.gateway.listen,
            http=config.gateway.http,
            metrics=config.gateway.metrics,
            router=self.router_endpoint,
            model=str(model_path),
            model_name=config.gateway.model_name or _model_name(config.model.path),
            dtype=config.model.dtype,
            device=config.model.device,
            max_seconds=config.gateway.max_seconds,
            max_calls=config.gateway.max_calls,
            page=config.gateway.page,
            api=config.http,
            log_level=config.logs.level,
            log_levels=config.logs.levels,
            log_format=config.logs.format,
            metric_names=config.metrics.also_as,
            metric_tenants=config.metrics.tenants,
            follow_stdin=True,
            drain_seconds=max(self._drain_seconds, GatewaySettings.drain_seconds),
            tokens=config.auth.tokens,
            tls=config.tls.files,
            peer_tls=config.internal_tls.files,
            lost_seconds=config.timeouts.lost,
            tracing=config.tracing,
        )

    @property
    def gateway_address(self) -> str:
        """Address of the gateway's gRPC server; empty without a gateway."""
        return self._gateway.settings.listen if self._gateway else ""

    @property
    def http_address(self) -> str:
        """Address of the gateway's HTTP server; empty without a gateway or without HTTP."""
        return self._gateway.settings.http if self._gateway else ""

    @property
    def metrics_address(self) -> str:
        """Address of the gateway's metrics; empty without a gateway or without metrics."""
        return self._gateway.settings.metrics if self._gateway else ""

    def watch(self) -> None:
        """Replace a router, leader or gateway that died, until stopped. Raises Unavailable, ConfigError."""
        assert self._router is not None, "the cluster has started"
        trouble, router, looked_at = "", self._router.process, 0.0
        while not self._stopped.wait(POLL_SECONDS):
            if (now := time.monotonic()) - looked_at > RAY_SECONDS:
                looked_at = now
                if (forks := self._directory.forks) is not None and forks.process.poll() is not None:
                    log.warning("the process that forks Ray's workers has ended; those to come start more slowly")
                    self._directory.end_forks()
                if ended := find_ended(self._own_ray):
                    raise Unavailable(f"Ray's {ended} has ended, and all rings with it")
            event = self._router.look()
            if self._router.process is not router:
                router = self._router.process
                self._rings.want_parked()
            if self._router.trouble != trouble:
                trouble = self._router.trouble
                self._note_trouble(trouble)
            if event is not None:
                self._rings.want(event)
            self._rings.look()
            self._measure_next()
            if self._gateway is not None:
                self._gateway.look(self._stopped)

    def drain(self, insisted: threading.Event) -> None:
        """Let running turns end, within `drain_seconds` and until `insisted` is set; new ones are refused."""
        if not self._drain_seconds:
            return
        self._progress(f"draining, for {self._drain_seconds:g} s at most")
        if self._gateway is not None:
            self._gateway.terminate()  # it ends when its turns have
        access = RouterAccess(
            endpoint=self.router_endpoint, tls=self._config.internal_tls.files, progress=self._progress
        )
        try:
            asyncio.run(run_until_set(insisted, drain_all(access, seconds=self._drain_seconds)))
        except RingserveError as error:
            log.warning("turns may be cut off: %s", error)

    def stop(self) -> None:
        """End everything that `start` began. Idempotent; safe after a start that failed half way."""
        if self._gateway is not None:
            self._gateway.end()
            self._gateway = None
        if ray.is_initialized():
            if not find_ended(self._own_ray):
                self._stop_actors()
            forks = [psutil.Process(forks.process.pid)] if (forks := self._directory.forks) else []
            own = families([*self._own_ray, *forks])
            self._directory.end_forks()
            try:
                ray.shutdown()
            except OSError as error:  # its processes end by themselves meanwhile, and their files with them
                log.warning("Ray ended with an error: %s", reason_of(error))
            end_left_behind(own)
        self._directory.remove()

    def _stop_actors(self) -> None:
        # With `leaves_ranks` the leaders are not stopped in order: their ranks stay, and the leaders end with this
        # process.
        leaders = [] if self._leaves_ranks else self._rings.leaders
        stops = [leader.actor.stop.remote() for leader in leaders]
        if self._router is not None:
            self._router.end_spare()  # a spare may exist even while no router runs
        if self._router is not None and isinstance(self._router.process, RayRouter):
            stops.append(self._router.process.actor.stop.remote())
        deadline, late = time.monotonic() + ACTORS_STOP_SECONDS, stops
        # What stops this process may have stopped Ray's too, such as a signal to the process group.
        while late and time.monotonic() < deadline and not find_ended(self._own_ray):
            _, late = ray.wait(stops, num_returns=len(stops), timeout=RAY_LOOK_SECONDS)
        if late:
            log.warning("%d of %d actors did not stop in time and are ended with Ray", len(late), len(stops))
        if late and not find_ended(self._own_ray):
            for leader in leaders:
                free_places(leader.host.name)  # ranks outlive their leader on a Ray that runs on


def _model_name(path: str) -> str:
    """Return the model name over HTTP if the configuration gives none."""
    return path if path.startswith(PREFIX) else Path(path).name


def _check_free(addresses: Mapping[str, str]) -> None:
    """Check now that the ports of these keys are free, instead of half a minute into the start. Raises ConfigError."""
    taken = {key: reason for key, address in addresses.items() if (reason := _why_taken(address))}
    if taken:
        reasons = "; ".join(f"{key}: cannot listen on {addresses[key]}: {reason}" for key, reason in taken.items())
        advice = " ".join(f"--set {key}=127.0.0.1:0" for key in taken)
        raise ConfigError(f"{reasons}; choose another port, or any free one with {advice}")


def _why_taken(address: str) -> str:
    """Return why nothing can listen at an address; empty if it is free."""
    if not address:
        return ""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            return error.strerror or str(error)
    return ""

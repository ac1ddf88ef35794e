"""Router, rings and a gateway process on a Ray of our own, or without gateway on a Ray cluster. `ringserve up` runs it.

What is started here is ended here, by handle: Ray with its driver, the gateway by its process, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_logging
from ray.exceptions import RayError, RayTaskError

from cp_core.errors import ConfigError, RingserveError, Unavailable
from orchestration.actors import host as host_actor
from services.auth.tenants import read_tokens
from services.config import Config
from services.gateway_settings import GatewaySettings
from services.hosts import LeaderHost, RouterHost
from services.router_profile import router_profile
from services.stopping import check_stop, keeping_handlers
from workers.builtin_model import PREFIX as BUILTIN_PREFIX
from workers.builtin_model import resolve_model_path
from workers.model_info import read_model_info, tensor_share

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 * 1024 * 1024
"""The least Ray allows: no tensor ever passes through it."""
ROUTER_NAME = "router"
GATEWAY_STOP_SECONDS = 10.0
RAY_END_SECONDS = 8.0
POLL_SECONDS = 0.2
RESTART_SECONDS = 1.0
"""Least time between two starts of one leader: one that cannot start must not keep the machine busy with trying."""


@dataclass(frozen=True, slots=True)
class _Leader:
    """A leader's actor. `serves` answers when its ring serves or has failed to, `leaves` when the ring
    has drained, or by failing."""

    host: LeaderHost
    actor: Any
    serves: Any
    leaves: Any
    started_at: float

    def has_left(self) -> bool:
        """Whether the ring has drained."""
        return _is_done(self.leaves) and not _has_failed(self.leaves)

    def failure(self) -> str:
        """Why it has to be started again, or nothing."""
        if _is_done(self.leaves) and not self.has_left():
            return "died"
        if not _is_done(self.serves):
            return ""
        try:
            ray.get(self.serves)
        except RayTaskError as error:
            return f"could not start its ring: {error.cause}"
        except RayError:
            return "died"
        return ""


class LocalCluster:
    """`start`, then `watch`, both until `stopped` is set, then `stop`. `progress` gets one line for each stage.

    With `config.ray.address` it runs on that Ray cluster, which it leaves as it was. Router and leaders are on the node
    it is called on, which so is where gateways and Prometheus find them.
    """

    def __init__(
        self,
        config: Config,
        progress: Callable[[str], None] = lambda line: None,
        stopped: threading.Event | None = None,
        *,
        with_gateway: bool = True,
    ) -> None:
        self._config = config
        self._progress = progress
        self._with_gateway = with_gateway
        self._stopped = stopped or threading.Event()
        # Of its own, so that names of one that has just ended are not in the way.
        self._namespace = f"ringserve-{uuid.uuid4().hex[:8]}"
        self._temp = Path(tempfile.mkdtemp(prefix="ringserve-"))
        self._leaders: dict[str, _Leader] = {}
        self._away: dict[str, LeaderHost] = {}  # rings that have drained
        self._num_leaders_made = 0
        self._router: Any = None
        self._gateway: subprocess.Popen[bytes] | None = None
        self.gateway_address = ""
        self.http_address = ""
        self.metrics_address = ""
        self.router_endpoint = ""

    def start(self) -> None:
        """Bring everything up; returns when the first request would be served.

        Raises ConfigError, ModelRefused, Unavailable; StopRequest where it was stopped meanwhile.
        """
        config = self._config
        path = resolve_model_path(config.model.path)
        model = read_model_info(path, dtype=config.model.dtype, name=Path(config.model.path).name)
        for pool in config.pools:
            tensor_share(model, pool.tp, f"{pool.key}.tp")
        profile = router_profile(config.router)
        _check_secrets(config)
        if self._with_gateway:
            for key in ("listen", "http", "metrics"):
                _check_free(f"gateway.{key}", getattr(config.gateway, key))
        if config.ray.address:
            self._progress(f"joining the Ray cluster at {config.ray.address}")
            self._join_ray()
        else:
            self._progress("starting Ray")
            self._start_ray()
        self._progress("starting the router")
        self._router = host_actor(ROUTER_NAME, RouterHost(config=config, model=model, profile=profile))
        self.router_endpoint = self._result(self._router.start.remote())
        hosts = [
            LeaderHost(
                config=config,
                model_path=str(path),
                pool=pool,
                number=number,
                router_endpoint=self.router_endpoint,
                listen_host="" if config.ray.address else "127.0.0.1",
            )
            for pool in config.pools
            for number in range(pool.groups)
        ]
        self._progress(f"starting {len(hosts)} rings{' and a gateway' if self._with_gateway else ''}")
        if self._with_gateway:
            self._start_gateway(path)
        for host in hosts:
            self._make_leader(host)
        for leader in self._leaders.values():
            self._result(leader.serves)
            self._progress(f"ring {leader.host.name} serves")
        if self._with_gateway:
            self._await_gateway()
            scheme = "https" if config.tls.files else "http"
            http = f", OpenAI's HTTP at {scheme}://{self.http_address}/v1" if self.http_address else ""
            self._progress(f"gateway serves at {self.gateway_address}{http}")
        for leader in self._leaders.values():
            # Not while the others start: rates measured on a busy machine would mislead the plans.
            self._result(leader.actor.measure.remote())

    def _start_ray(self) -> None:
        config = self._config
        _forward_every_line()
        needed = sum(pool.num_threads for pool in config.pools)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray guards a local cluster by a token, and warns that it does.
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        with keeping_handlers():
            ray.init(
                address="local",
                namespace=self._namespace,
                num_cpus=max(1, needed),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self._temp),
                _node_ip_address="127.0.0.1",
                logging_level=logging.WARNING,
            )

    def _join_ray(self) -> None:
        """The cluster may be starting still: it has the start timeout. Raises Unavailable."""
        _forward_every_line()
        address, deadline = self._config.ray.address, time.monotonic() + self._config.timeouts.start
        while True:
            try:
                with keeping_handlers():
                    ray.init(address=address, namespace=self._namespace, logging_level=logging.WARNING)
                return
            except (ConnectionError, RuntimeError, ValueError) as error:
                if ray.is_initialized():
                    ray.shutdown()
                if time.monotonic() > deadline:
                    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                    raise Unavailable(
                        f"ray.address: the Ray cluster at {address} cannot be joined: {reason}"
                    ) from error
            self._stopped.wait(RESTART_SECONDS)
            check_stop(self._stopped)

    def _make_leader(self, host: LeaderHost) -> None:
        # Ray frees the name of a dead actor when it likes: the successor gets another.
        self._num_leaders_made += 1
        actor = host_actor(f"{host.name}-{self._num_leaders_made}", host)
        self._leaders[host.name] = _Leader(
            host, actor, actor.start.remote(), actor.wait_event.remote(), time.monotonic()
        )

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

    def _start_gateway(self, model_path: Path) -> None:
        config = self._config
        settings = GatewaySettings(
            listen=self.gateway_address or config.gateway.listen,
            http=self.http_address or config.gateway.http,
            metrics=self.metrics_address or config.gateway.metrics,
            router=self.router_endpoint,
            model=str(model_path),
            model_name=config.gateway.model_name or _model_name(config.model.path),
            dtype=config.model.dtype,
            max_seconds=config.gateway.max_seconds,
            log_level=config.logs.level,
            log_format=config.logs.format,
            metric_names=config.metrics.also_as,
            follow_stdin=True,
            tokens=config.auth.tokens,
            tls=config.tls.files,
            peer_tls=config.internal_tls.files,
        )
        command = [sys.executable, "-m", "services.gateway_process", "--settings", settings.to_json()]
        # A session of its own: Ctrl-C reaches this process alone, which then ends the gateway in order.
        self._gateway = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def _await_gateway(self) -> None:
        assert self._gateway is not None, "no gateway was started"
        line = _read_line(self._gateway, self._config.timeouts.start)
        if not line:
            raise ConfigError("the gateway did not start; its reason stands above")
        addresses = json.loads(line)
        self.gateway_address, self.metrics_address = addresses["gateway"], addresses["metrics"]
        self.http_address = addresses["http"]

    def watch(self) -> None:
        """Start again a leader or gateway that died, until stopped. Raises Unavailable when the router died."""
        returning = self._router.wait_event.remote()
        while not self._stopped.wait(POLL_SECONDS):
            for leader in list(self._leaders.values()):
                self._restart_if_lost(leader)
            if _is_done(returning):
                self._bring_back(returning)
                returning = self._router.wait_event.remote()
            gateway = self._gateway
            if gateway is not None and gateway.poll() is not None:
                log.warning("the gateway died (exit %s) and is started again", gateway.returncode)
                self._start_gateway(resolve_model_path(self._config.model.path))
                self._await_gateway()

    def _bring_back(self, returning: Any) -> None:
        try:
            host = self._away.pop(ray.get(returning), None)
        except RayError as error:
            raise Unavailable("the router died; conversations are lost, start the cluster again") from error
        if host is not None:
            log.info("ring %s is started again", host.name)
            self._make_leader(host)

    def _see_off(self, leader: _Leader) -> None:
        """The ring has drained: its processes end, and it stays away until it is wanted again."""
        if not ray.wait([leader.actor.stop.remote()], timeout=GATEWAY_STOP_SECONDS)[0]:
            log.warning("the leader of ring %s did not stop in time and is ended", leader.host.name)
        ray.kill(leader.actor)
        del self._leaders[leader.host.name]
        self._away[leader.host.name] = leader.host

    def _restart_if_lost(self, leader: _Leader) -> None:
        if leader.has_left():
            self._see_off(leader)
            return
        reason = leader.failure()
        if reason and time.monotonic() - leader.started_at > RESTART_SECONDS:
            log.warning("the leader of ring %s %s; it is started again", leader.host.name, reason)
            ray.kill(leader.actor)
            self._make_leader(leader.host)

    def stop(self) -> None:
        """End everything that `start` began. Idempotent; safe after a start that failed half way."""
        if self._gateway is not None:
            _end_process(self._gateway)
            self._gateway = None
        if ray.is_initialized():
            self._stop_actors()
            own = [] if self._config.ray.address else psutil.Process().children(recursive=True)
            ray.shutdown()
            _end_left_behind(own)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _stop_actors(self) -> None:
        stops = [leader.actor.stop.remote() for leader in self._leaders.values()]
        if self._router is not None:
            stops.append(self._router.stop.remote())
        done, late = ray.wait(stops, num_returns=len(stops), timeout=GATEWAY_STOP_SECONDS) if stops else ([], [])
        if late:
            log.warning("%d of %d actors did not stop in time and are ended with Ray", len(late), len(done) + len(late))


def _model_name(path: str) -> str:
    """What HTTP clients call the model where the configuration names nothing."""
    return path if path.startswith(BUILTIN_PREFIX) else Path(path).name


def _forward_every_line() -> None:
    """Ray folds lines that differ by numbers alone, as those of two rings do. Its switch was read at its import."""
    vars(ray_logging)["RAY_DEDUP_LOGS"] = False


def _is_done(reference: Any) -> bool:
    return bool(ray.wait([reference], timeout=0)[0])


def _has_failed(reference: Any) -> bool:
    try:
        ray.get(reference)
    except RayError:
        return True
    return False


def _check_secrets(config: Config) -> None:
    """Say that a file of keys or tokens cannot be used now, and not after half a minute. Raises ConfigError."""
    if config.tls.files is not None:
        config.tls.files.http_context()
    if config.internal_tls.files is not None:
        config.internal_tls.files.channel_credentials()
    if config.auth.tokens:
        read_tokens(Path(config.auth.tokens))


def _check_free(key: str, address: str) -> None:
    """Say that a port is in use now, and not after half a minute."""
    if not address:
        return
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise ConfigError(f"{key}: cannot listen on {address}: {error.strerror}; choose another port") from error


def _read_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    """The first line the process prints, or nothing if it ends or `timeout` seconds pass before."""
    lines: list[bytes] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(timeout)
    return lines[0] if lines else b""


def _end_left_behind(processes: list[psutil.Process]) -> None:
    """Agents of a Ray that has ended sometimes hang on their way out, and nobody else would ever end them."""
    _, alive = psutil.wait_procs(processes, timeout=RAY_END_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GATEWAY_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

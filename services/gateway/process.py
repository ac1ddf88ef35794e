"""Gateway process, which owns both servers. It stops on SIGTERM, on SIGINT, or when its parent ends.

A second signal ends the turns that still run. A local cluster and `ringserve gateway` run it.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client.registry import Collector

from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS
from ringserve.orchestration.tasks import beside_others
from ringserve.services.auth.authenticator import Authenticator, TokenFile
from ringserve.services.gateway.openai.app import HttpApi
from ringserve.services.gateway.openai.server import HttpServer
from ringserve.services.gateway.requests import RequestReader
from ringserve.services.gateway.servicer import InferenceServicer
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.gateway.text import TextCodec
from ringserve.services.gateway.turn_stream import ROUTER_SECONDS
from ringserve.services.rpc.peers import GrpcPeers
from ringserve.services.rpc.server import GrpcServer, HealthWatch
from ringserve.services.telemetry.logs import set_up_logs
from ringserve.services.telemetry.metrics.endpoint import MetricsEndpoint, metrics_page, probe_pages, targets_page
from ringserve.services.telemetry.metrics.gateway import GatewayMetrics
from ringserve.services.telemetry.metrics.registry import GATEWAY_NAMES, WithVllmNames
from ringserve.services.telemetry.tracing import make_tracer
from ringserve.v1 import inference_pb2_grpc
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import ModelInfo

ABORT_GRACE_SECONDS = 5.0
"""Seconds the rings have to release aborted turns."""
DESCRIPTORS = 65536
"""File descriptors that a gateway takes if the system lets it."""
FLUSH_SECONDS = 2.0
"""Seconds that written responses have to reach their clients."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of a model that a gateway needs, loaded."""

    path: Path
    model: ModelInfo
    codec: TextCodec


def load_model_files(settings: GatewaySettings) -> ModelFiles:
    """Load the files of the settings' model. Raises ConfigError."""
    path = resolve_model_path(settings.model)
    model = read_model_info(path, settings.dtype, Path(settings.model).name, settings.device)
    return ModelFiles(path, model, TextCodec(path))


async def serve(settings: GatewaySettings, files: ModelFiles) -> None:
    """Serve until a signal or the parent's end. The first line on standard output is JSON: the listening addresses.

    With a parent to follow, each later line is a heartbeat. A spare first prints an empty line, which tells its parent
    that the model's files are loaded. It then waits for the settings to serve with, and reads secrets only after that.
    """
    path, model, codec = files.path, files.model, files.codec
    if settings.is_spare:
        print(flush=True)
        line = await asyncio.to_thread(sys.stdin.buffer.readline)
        if not line.endswith(b"\n"):
            return  # its parent has ended
        settings = GatewaySettings.from_json(line)
    authenticator = Authenticator(_token_file(settings))
    peers = GrpcPeers(settings.peer_tls, settings.lost_seconds, ROUTER_SECONDS)
    metrics = GatewayMetrics(settings.metric_tenants)
    metrics.add_tenants(authenticator.tenants)
    name = _model_name(settings)
    reader = RequestReader(model, codec, settings.max_seconds, (name, str(path)))
    router = peers.router(settings.router)
    tracer = make_tracer(settings.tracing.endpoint, settings.tracing.sample_ratio, "gateway")
    servicer = InferenceServicer(model, str(path), name, codec, reader, router, peers, metrics, authenticator, tracer)
    credentials = settings.tls.grpc_credentials() if settings.tls else None
    server = GrpcServer(credentials, max_calls=settings.max_calls, admit=servicer.admit)
    server.add(
        "ringserve.v1.Inference", lambda target: inference_pb2_grpc.add_InferenceServicer_to_server(servicer, target)
    )
    stopped, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stopped.is_set() else stopped).set())
    if settings.follow_stdin:
        descriptor = sys.stdin.fileno()
        loop.add_reader(descriptor, lambda: None if os.read(descriptor, 4096) else stopped.set())

    watch = HealthWatch("the gateway", server, router.find_fault)
    shown = _choose_collector(settings, metrics)
    endpoint = _serve_metrics(settings, shown, peers, watch)
    metrics_address = endpoint.address if endpoint else ""
    api = HttpApi(
        servicer,
        name,
        model,
        authenticator,
        has_page=settings.page,
        config=settings.api,
        metrics=shown,
    )
    http_server = HttpServer(api.app, settings.tls.http_context() if settings.tls else None)
    http_address = await http_server.start(settings.http) if settings.http else ""
    address = await server.start(settings.listen, is_serving=False)
    watch.start()
    print(json.dumps({"gateway": address, "http": http_address, "metrics": metrics_address}), flush=True)
    signs = asyncio.create_task(_send_heartbeats()) if settings.follow_stdin else None
    await stopped.wait()
    await watch.close()
    await _close_servers(server, http_server, servicer.end_turns(settings.drain_seconds, hurry), settings.drain_seconds)
    await peers.close()
    await asyncio.to_thread(tracer.close)
    if signs is not None:
        signs.cancel()
    if endpoint:
        await asyncio.to_thread(endpoint.close)


async def _send_heartbeats() -> None:
    """Print an empty line at intervals, so that the parent knows that this process is alive."""
    descriptor = sys.stdout.fileno()
    os.set_blocking(descriptor, False)  # a suspended parent reads nothing, and a full pipe must not block this process
    while True:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b"\n")
        await asyncio.sleep(HEARTBEAT_SECONDS / 2)


def _token_file(settings: GatewaySettings) -> TokenFile | None:
    """Return the tenants file; None if every caller is admitted."""
    takes_certificates = settings.tls is not None and bool(settings.tls.client_ca)
    return TokenFile(Path(settings.tokens), takes_certificates=takes_certificates) if settings.tokens else None


async def _close_servers(
    server: GrpcServer, http_server: HttpServer, end_turns: Awaitable[None], drain_seconds: float
) -> None:
    """Refuse new calls, and close the servers once `end_turns` returns.

    Calls other than turns, such as health watches, do not delay the end.
    """
    closing = asyncio.gather(
        server.stop(drain_seconds + ABORT_GRACE_SECONDS), http_server.stop(drain_seconds + ABORT_GRACE_SECONDS)
    )
    await end_turns
    await asyncio.wait([closing], timeout=FLUSH_SECONDS)
    http_server.hurry()
    await server.stop(0)
    await closing


def _model_name(settings: GatewaySettings) -> str:
    """Return the model name that requests use."""
    return settings.model_name or Path(settings.model).name


def _choose_collector(settings: GatewaySettings, metrics: GatewayMetrics) -> Collector:
    """Return the metrics to serve, with vLLM's names too if the settings ask for them."""
    if settings.metric_names != "vllm":
        return metrics.registry
    return WithVllmNames(metrics.registry.collect, GATEWAY_NAMES, Path(settings.model).name)


def _serve_metrics(
    settings: GatewaySettings, shown: Collector, peers: GrpcPeers, watch: HealthWatch
) -> MetricsEndpoint | None:
    """Serve this gateway's /metrics and probes, and /targets with the metrics endpoints of router and rings."""
    if not settings.metrics:
        return None
    router, loop = peers.router(settings.router), asyncio.get_running_loop()
    pages = {
        "/metrics": metrics_page(shown),
        "/targets": targets_page(router.get_server_info, lambda: own, loop),
        **probe_pages(lambda: watch.fault, loop, lambda: watch.is_admitting),
    }
    endpoint = MetricsEndpoint("gateway.metrics", settings.metrics, pages)
    own = endpoint.address
    return endpoint


def run_gateway(settings: GatewaySettings) -> int:
    """Run a gateway. Return 0 if it ended as asked, or 1 after an error, which is one sentence on standard error."""
    set_up_logs("gateway", settings.log_level, settings.log_format, settings.log_levels)
    # Shells often allow only 1024 file descriptors, and each HTTP stream takes one.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
    try:
        files = beside_others(partial(load_model_files, settings), settings.niceness)
        asyncio.run(serve(settings, files))
    except RingserveError as error:
        print(f"ringserve: {error}", file=sys.stderr)
        return 1
    return 0

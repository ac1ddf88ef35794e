"""`ringserve gateway`: one more gateway for a cluster whose router is known. Needs no Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from ringserve.cp_core.errors import ConfigError
from ringserve.services.auth.sections import SECRET_VARIABLE, check_public_endpoints
from ringserve.services.cli.command import command, one_of
from ringserve.services.cli.options import ConfigOptions, DrainSeconds
from ringserve.services.cluster.state import secret_of
from ringserve.services.config import LOG_LEVELS, METRIC_NAMES
from ringserve.services.config.checks import DEVICES
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.telemetry.logs import LOG_FORMATS, levels_by_module


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    config: ConfigOptions
    listen: Annotated[str, Option(metavar="HOST:PORT", help="where clients call")]
    http: Annotated[str, Option(metavar="HOST:PORT", help="where OpenAI's HTTP is served (default: nowhere)")] = ""
    metrics: Annotated[str, Option(metavar="HOST:PORT", help="where Prometheus asks (default: nowhere)")] = ""
    metric_names: Annotated[str, one_of(METRIC_NAMES, help="vllm: show its names as well (default: ours alone)")] = ""
    router: Annotated[str, Option(metavar="HOST:PORT", help="the router, as 'ringserve status' shows it")]
    model: Annotated[str, Option(metavar="DIR", help="model directory or built-in model")]
    model_name: Annotated[
        str, Option(metavar="NAME", help="what HTTP clients call it (default: the directory's name)")
    ] = ""
    dtype: Annotated[str, Option(metavar="NAME", help="the rings' dtype")] = "float32"
    device: Annotated[str, one_of(DEVICES, help="the rings' device")] = "cpu"
    max_seconds: Annotated[float, Option(metavar="N", help="longest a turn may take")] = 600.0
    log_level: Annotated[str, one_of(LOG_LEVELS, help="what to log")] = "info"
    log_levels: Annotated[
        str, Option(metavar="LIST", help="of single modules: 'MODULE=LEVEL ...' (as logs.levels)")
    ] = ""
    log_format: Annotated[str, one_of(LOG_FORMATS, help="for people or machines")] = "human"
    drain_seconds: DrainSeconds = 2.0


@command("ringserve gateway --listen 127.0.0.1:50052 --router 127.0.0.1:41000 --model builtin:tiny")
def gateway(options: GatewayOptions) -> int:
    from ringserve.services.gateway.process import run_gateway

    # Of these only tls, auth, tracing, http, timeouts.lost, gateway.insecure and .page, and metrics.tenants count.
    config = options.config.load()
    endpoints = {"--listen": options.listen, "--http": options.http}
    check_public_endpoints(endpoints, config.tls, config.auth, is_insecure=config.gateway.insecure)
    if secret := secret_of(options.router):
        os.environ.setdefault(SECRET_VARIABLE, secret)
    return run_gateway(
        GatewaySettings(
            listen=options.listen,
            http=options.http,
            metrics=options.metrics,
            metric_names=options.metric_names,
            metric_tenants=config.metrics.tenants,
            router=options.router,
            model=options.model,
            model_name=options.model_name or (options.model if options.model.startswith("builtin:") else ""),
            dtype=options.dtype,
            device=options.device,
            max_seconds=options.max_seconds,
            page=config.gateway.page,
            api=config.http,
            log_level=options.log_level,
            log_levels=_checked_levels(options.log_levels),
            log_format=options.log_format,
            drain_seconds=options.drain_seconds,
            tokens=config.auth.tokens,
            tls=config.tls.files,
            peer_tls=config.internal_tls.files,
            lost_seconds=config.timeouts.lost,
            tracing=config.tracing,
        )
    )


def _checked_levels(text: str) -> str:
    """Return levels of modules as they are. Raises ConfigError."""
    try:
        levels_by_module(text)
    except ConfigError as error:
        raise ConfigError(f"--log-levels: {error}") from None
    return text

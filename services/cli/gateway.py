"""`ringserve gateway`: one more gateway for a cluster whose router is known. Needs no Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ringserve.cp_core.errors import ConfigError
from ringserve.services.auth.tls import SECRET_VARIABLE
from ringserve.services.cli.command import command, one_of, option
from ringserve.services.cli.options import ConfigOptions, DrainSeconds
from ringserve.services.cluster.state import secret_of
from ringserve.services.config import DEVICES, LOG_LEVELS, METRIC_NAMES
from ringserve.services.config.sections import default_dtype
from ringserve.services.config.tree import check_exposure
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.telemetry.logs import LOG_FORMATS, levels_by_module


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    config: ConfigOptions
    listen: str = option("where clients call", "HOST:PORT")
    http: str = option("where OpenAI's HTTP is served (default: nowhere)", "HOST:PORT", "")
    metrics: str = option("where Prometheus asks (default: nowhere)", "HOST:PORT", "")
    metric_names: str = one_of("vllm: its metric names as well (default: ringserve's alone)", METRIC_NAMES, "")
    router: str = option("the router, as 'ringserve status' shows it", "HOST:PORT")
    model: str = option("model directory or built-in model", "DIR")
    model_name: str = option("what HTTP clients call it (default: the directory's name)", "NAME", "")
    dtype: str = option("the rings' dtype, with the values of model.dtype", "NAME", "auto")
    device: str = one_of("the rings' device", DEVICES, "cpu")
    max_seconds: float = option("longest a turn may take", "N", 600.0)
    log_level: str = one_of("what to log", LOG_LEVELS, "info")
    log_levels: str = option("log levels of single modules: 'MODULE=LEVEL ...', as in logs.levels", "LIST", "")
    log_format: str = one_of("for people or machines", LOG_FORMATS, "human")
    drain_seconds: DrainSeconds = 2.0


@command("ringserve gateway --listen 127.0.0.1:50052 --router 127.0.0.1:41000 --model builtin:tiny")
def gateway(options: GatewayOptions) -> int:
    from ringserve.services.gateway.process import run_gateway

    # Of the configuration only tls, internal_tls, auth, tracing, http, timeouts.lost, gateway.insecure and .page, and
    # metrics.tenants count.
    config = options.config.load()
    check_exposure("--listen", options.listen, config)
    check_exposure("--http", options.http, config)
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
            dtype=default_dtype(options.device) if options.dtype == "auto" else options.dtype,
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
    """Return `text`, if it can be read as levels of modules. Raises ConfigError."""
    try:
        levels_by_module(text)
    except ConfigError as error:
        raise ConfigError(f"--log-levels: {error}") from None
    return text

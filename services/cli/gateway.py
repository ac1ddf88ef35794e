"""`ringserve gateway`: one more gateway for a cluster whose router is known. Needs no Ray."""

from __future__ import annotations

import argparse
import os

from ringserve.cp_core.errors import ConfigError
from ringserve.services.auth.sections import SECRET_VARIABLE, check_public_endpoints
from ringserve.services.cli.options import Subcommands, add_config_options, check_drain_seconds, config_of
from ringserve.services.cluster.state import secret_of
from ringserve.services.config import LOG_LEVELS, METRIC_NAMES
from ringserve.services.config.checks import DEVICES
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.telemetry.logs import LOG_FORMATS, levels_by_module

EXAMPLE = """example:
  ringserve gateway --listen 127.0.0.1:50052 --router 127.0.0.1:41000 --model builtin:tiny
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "gateway", help="run one more gateway", epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    add_config_options(parser)
    parser.add_argument("--listen", required=True, help="HOST:PORT for clients")
    parser.add_argument("--http", default="", help="HOST:PORT for OpenAI's HTTP (default: none)")
    parser.add_argument("--metrics", default="", help="HOST:PORT for Prometheus (default: none)")
    parser.add_argument(
        "--metric-names", choices=METRIC_NAMES, default="", help="vllm: show its names as well (default: ours alone)"
    )
    parser.add_argument("--router", required=True, help="HOST:PORT of the router, as 'ringserve status' shows it")
    parser.add_argument("--model", required=True, help="model directory or built-in model")
    parser.add_argument("--model-name", default="", help="what HTTP clients call it (default: the directory's name)")
    parser.add_argument("--dtype", default="float32", help="the rings' dtype (default: float32)")
    parser.add_argument(
        "--device", choices=DEVICES, default="cpu", help="the rings' device, cpu or cuda (default: cpu)"
    )
    parser.add_argument("--max-seconds", type=float, default=600.0, help="longest a turn may take (default: 600)")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what to log (default: info)")
    parser.add_argument(
        "--log-levels", default="", metavar="LIST", help="of single modules: 'MODULE=LEVEL ...' (as logs.levels)"
    )
    parser.add_argument(
        "--log-format", choices=LOG_FORMATS, default="human", help="for people or machines (default: human)"
    )
    parser.add_argument(
        "--drain-seconds", type=float, default=2.0, help="how long turns may go on when it is told to end (default: 2)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from ringserve.services.gateway.process import run_gateway

    config = config_of(
        options
    )  # tls, auth, tracing, http, gateway.insecure and .page, metrics.tenants: the rest are options
    endpoints = {"--listen": options.listen, "--http": options.http}
    check_public_endpoints(endpoints, config.tls, config.auth, is_insecure=config.gateway.insecure)
    check_drain_seconds(options.drain_seconds)
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

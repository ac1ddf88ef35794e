"""Options that several subcommands share, and the cluster or gateway that they name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringserve.client import Client, RetryPolicy, TlsFiles
from ringserve.cp_core.errors import ConfigError, InvalidRequest, NotFound
from ringserve.services.cluster.state import require_ready
from ringserve.services.config import Config, LogConfig, load_config

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object

MAX_DRAIN_SECONDS = 86_400.0
TOKEN_VARIABLE = "RINGSERVE_TOKEN"
"""Environment variable with the bearer token of commands that call a gateway."""
AT_ONCE = RetryPolicy(max_attempts=1, connect_seconds=0.0)
"""Retries of a user who waits: a refusal is told at once, and a turn that has begun outlives its gateway."""


def check_text(key: str, text: str) -> str:
    """Return a text that was typed or given, if it is UTF-8. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{key}: byte {error.start + 1} is no UTF-8 text; convert it to UTF-8") from None
    return text


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="configuration file (YAML)")
    parser.add_argument(
        "--set", action="append", metavar="SECTION.KEY=VALUE", help="override one value, e.g. prefill.cp=4; repeatable"
    )


def config_of(options: argparse.Namespace) -> Config:
    """Load the configuration that the options name. Raises ConfigError."""
    overrides: dict[str, str] = {}
    for item in options.set or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set: {item!r} is not SECTION.KEY=VALUE")
        overrides[key] = value
    return load_config(options.config, overrides)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="gateway, HOST:PORT (default: that of the local cluster)")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="use TLS; authority of the gateway's certificate")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="client certificate, for mutual TLS")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="key of the client certificate")
    parser.add_argument("--tls-server-name", default="", metavar="NAME", help="name in the gateway's certificate")
    parser.add_argument("--name", default="default", help="name of the local cluster (default: default)")


def client_of(options: argparse.Namespace, target: str = "") -> Client:
    """Return a client of the target; its token comes from the environment, since command lines are public.

    Raises NotFound without a target and a local cluster, ConfigError for files that cannot be read.
    """
    tls = None
    if options.tls_ca or options.tls_cert or options.tls_key:
        tls = TlsFiles(
            ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key, server_name=options.tls_server_name
        )
    return Client(target or target_of(options), token=os.environ.get(TOKEN_VARIABLE, ""), tls=tls, retry=AT_ONCE)


def target_of(options: argparse.Namespace) -> str:
    """Return the address of the gateway. Raises NotFound without a target and a local cluster."""
    target = options.target or require_ready(options.name).gateway
    if not target:
        raise NotFound(f"the cluster {options.name!r} runs no gateway of its own; give --target HOST:PORT")
    return str(target)


def check_drain_seconds(seconds: float) -> None:
    """Check --drain-seconds. Raises ConfigError."""
    if not 0 <= seconds <= MAX_DRAIN_SECONDS:
        raise ConfigError(f"--drain-seconds: {seconds:g} is not allowed; use 0 to {MAX_DRAIN_SECONDS:g}")


def add_router_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of operators' commands, which call the router; clients call gateways only."""
    parser.add_argument("--target", help="router, HOST:PORT (default: that of the local cluster)")
    parser.add_argument("--name", default="default", help="name of the local cluster (default: default)")
    add_config_options(parser)


def router_of(options: argparse.Namespace) -> str:
    """Return the address of the router. Raises NotFound without a target and a local cluster."""
    return str(options.target or require_ready(options.name).router)


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", action="store_true", help="start a cluster for the measurement, and stop it")
    add_target_options(parser)
    add_config_options(parser)


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[str]:
    """Yield the gateway of a measurement, HOST:PORT, of a running cluster or of one started for the context.

    Raises ConfigError for options that exclude each other.
    """
    if not options.start:
        if options.config is not None or options.set:
            raise ConfigError("--config and --set: only for a cluster that --start starts")
        yield target_of(options)
        return
    if options.target is not None:
        raise ConfigError("--target: a cluster that --start starts has its own")
    config = config_of(options)
    # Free ports avoid clashes with other clusters; info lines would break the progress bar.
    gateway = replace(config.gateway, listen="127.0.0.1:0", metrics="", http="")
    # Commands that start no cluster do without Ray: its import takes longer than all else of them.
    from ringserve.services.cluster.local import LocalCluster

    cluster = LocalCluster(replace(config, gateway=gateway, logs=LogConfig(level="warning")))
    try:
        cluster.start()
        yield cluster.gateway_address
    finally:
        cluster.stop()

"""The cluster that a measurement asks: one that runs, or its own, started and stopped with it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from cp_core.errors import ConfigError
from services.cli.options import add_config_options, add_target_options, config_of, target_of
from services.cluster.local import LocalCluster
from services.config import LogConfig


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--start", action="store_true", help="start a cluster for the measurement, and stop it")
    add_target_options(parser)
    add_config_options(parser)


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[str]:
    """Its gateway, HOST:PORT. Raises ConfigError for options that do not go together."""
    if not options.start:
        if options.config is not None or options.set:
            raise ConfigError("--config and --set: only for a cluster that --start starts")
        yield target_of(options)
        return
    if options.target is not None:
        raise ConfigError("--target: a cluster that --start starts has its own")
    config = config_of(options)
    # On ports of the system's choice, so that it stands beside any other; its log lines would tear the bar.
    gateway = replace(config.gateway, listen="127.0.0.1:0", metrics="", http="")
    cluster = LocalCluster(replace(config, gateway=gateway, logs=LogConfig(level="warning")))
    try:
        cluster.start()
        yield cluster.gateway_address
    finally:
        cluster.stop()

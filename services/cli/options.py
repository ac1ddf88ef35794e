"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from cp_core.errors import ConfigError, NotFound
from services.config import Config, load_config
from services.state import require_state

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="configuration file (YAML)")
    parser.add_argument(
        "--set", action="append", metavar="SECTION.KEY=VALUE", help="override one value, e.g. prefill.cp=4; repeatable"
    )


def config_of(options: argparse.Namespace) -> Config:
    """Raises ConfigError."""
    overrides: dict[str, str] = {}
    for item in options.set or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set: {item!r} is not SECTION.KEY=VALUE")
        overrides[key] = value
    return load_config(options.config, overrides)


def add_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="gateway, HOST:PORT (default: that of the local cluster)")
    parser.add_argument("--name", default="default", help="name of the local cluster (default: default)")


def target_of(options: argparse.Namespace) -> str:
    """Raises NotFound when neither a target nor a local cluster is there."""
    target = options.target or require_state(options.name).gateway
    if not target:
        raise NotFound(f"the cluster {options.name!r} runs no gateway of its own; give --target HOST:PORT")
    return str(target)

"""Options that several commands share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config import Config, load_config

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subcommands = object


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `config_of` reads."""
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

"""`ringserve config`: print every key of the configuration with its value, as a file that `--config` takes."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from services.cli.options import Subcommands, add_config_options, config_of
from services.config import Config

EXAMPLES = """examples:
  ringserve config > cluster.yaml
  ringserve config --config cluster.yaml --set prefill.cp=4
"""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "config",
        help="print all keys of the configuration with their values",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    print("\n".join(lines_of(config_of(options))))
    return 0


def lines_of(config: Config) -> Iterator[str]:
    """Yield a configuration as lines of YAML: each section under the words that explain its keys."""
    for number, each in enumerate(fields(config)):
        section = getattr(config, each.name)
        if number:
            yield ""
        for line in (inspect.getdoc(type(section)) or "").splitlines():
            yield f"# {line}".rstrip()
        shown = yaml.safe_dump({each.name: _plain(section)}, sort_keys=False, allow_unicode=True, width=1000)
        yield from shown.splitlines()


def _plain(value: Any) -> Any:
    """Return sections and mappings as plain mappings."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value

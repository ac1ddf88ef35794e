"""`ringserve config`: print every key of the configuration with its value, as a file that `--config` takes.

With `--markdown` it prints the page docs/configuration.md: the same words, and each key's name in the environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import yaml

from ringserve.services.cli.command import command, flag
from ringserve.services.cli.options import ConfigOptions
from ringserve.services.config import Config
from ringserve.services.config.reading import ENV_PREFIX


@dataclass(frozen=True, kw_only=True)
class ShownConfig:
    config: ConfigOptions
    markdown: bool = flag("print a page of all keys and their values instead")


@command(
    "ringserve config > cluster.yaml",
    "ringserve config --config cluster.yaml --set prefill.cp=4",
    "ringserve config --markdown > docs/configuration.md",
)
def config(options: ShownConfig) -> int:
    lines = markdown_of if options.markdown else lines_of
    print("\n".join(lines(options.config.load())))
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


def markdown_of(config: Config) -> Iterator[str]:
    """Yield a configuration as lines of Markdown: each section with its words and a table of its keys."""
    yield "# Configuration reference"
    yield ""
    yield "`ringserve config --markdown` writes this page from the code. [configuring.md](configuring.md) explains how"
    yield "to set keys, and those that are most likely to change."
    for each in fields(config):
        section = getattr(config, each.name)
        yield from ("", f"## {each.name}", "")
        yield from (line.rstrip() for line in (inspect.getdoc(type(section)) or "").splitlines())
        yield from ("", "| key | default | in the environment |", "|---|---|---|")
        for key, value in _plain(section).items():
            shown = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()
            variable = f"{ENV_PREFIX}{each.name}__{key}".upper()
            yield f"| `{each.name}.{key}` | `{shown}` | {'' if isinstance(value, dict) else f'`{variable}`'} |"


def _plain(value: Any) -> Any:
    """Return sections and mappings as plain mappings."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value

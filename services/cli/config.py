"""`ringserve config`: print every key of the configuration with its value, as a file that `--config` takes.

With `--markdown` it prints the page docs/configuration.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.services.cli.command import command, flag
from ringserve.services.cli.options import ConfigOptions
from ringserve.services.config.reference import markdown_lines, yaml_lines


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
    lines = markdown_lines if options.markdown else yaml_lines
    print("\n".join(lines(options.config.load())))
    return 0

"""Reference of all keys, generated from the sections: as a YAML file with comments, and as a page of Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from textwrap import wrap
from typing import Any

import yaml
from pydantic.fields import FieldInfo

from ringserve.services.config.sources import ENV_PREFIX, allowed, keys_of
from ringserve.services.config.tree import Config

WIDTH = 116
INTRODUCTION = f"""# Configuration reference

`ringserve config --markdown` writes this page from the code. [configuring.md](configuring.md) explains how to set keys,
and describes the keys that users most often change. In the environment a key such as `prefill.cp` is
`{ENV_PREFIX}PREFILL__CP`."""


def yaml_lines(config: Config) -> Iterator[str]:
    """Yield a configuration as a YAML file: each key under its meaning, its values and an example."""
    for number, section in enumerate(fields(config)):
        values: Any = getattr(config, section.name)
        yield from ("",) if number else ()
        yield from _comments(" ".join(_words_of(values).split()), "")
        yield f"{section.name}:"
        for name, key in keys_of(type(values)).items():
            possible = (text := allowed(key))[0].upper() + text[1:]
            yield from _comments(f"{key.description} {possible}, e.g. {_shown(_example_of(key))}.", "  ")
            yield from (f"  {line}" for line in _dumped({name: _plain(getattr(values, name))}, is_flow=False))


def markdown_lines(config: Config) -> Iterator[str]:
    """Yield a configuration as a page of Markdown: each section with a table of its keys."""
    yield INTRODUCTION
    for section in fields(config):
        values: Any = getattr(config, section.name)
        yield from ("", f"## {section.name}", "", _words_of(values), "")
        yield from ("| key | default | allowed | example | meaning |", "|---|---|---|---|---|")
        for name, key in keys_of(type(values)).items():
            shown = (_shown(_plain(getattr(values, name))), allowed(key), _shown(_example_of(key)))
            default, can_be, example = (each.replace("|", r"\|") for each in shown)
            yield f"| `{section.name}.{name}` | `{default}` | {can_be} | `{example}` | {key.description} |"


def _words_of(section: Any) -> str:
    return inspect.getdoc(type(section)) or ""


def _example_of(key: FieldInfo) -> Any:
    assert key.examples, f"{key} has no example"
    return key.examples[0]


def _comments(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in wrap(text, WIDTH - len(indent), break_on_hyphens=False))


def _shown(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    return "\n".join(_dumped(value, is_flow=True)).removesuffix("\n...")


def _dumped(value: Any, *, is_flow: bool) -> list[str]:
    text = yaml.safe_dump(value, default_flow_style=is_flow, sort_keys=False, allow_unicode=True, width=1000)
    return text.splitlines()


def _plain(value: Any) -> Any:
    """Return sections in a mapping as plain mappings."""
    return {name: asdict(each) for name, each in value.items()} if isinstance(value, Mapping) else value

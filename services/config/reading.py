"""Reader of the configuration from all its sources. The environment is read here and nowhere else.

Order of precedence, highest first: `--set section.key=value`, environment `RINGSERVE_SECTION__KEY`, file, default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from ringserve.cp_core.errors import ConfigError
from ringserve.services.auth.sections import absolute_paths
from ringserve.services.config.tree import Config

ENV_PREFIX = "RINGSERVE_"


def load_config(
    path: Path | None = None, overrides: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read, merge and check the configuration. Raises ConfigError naming the key, its value and what is allowed."""
    values: dict[str, Any] = {}
    if path is not None:
        values = _read_file(path)
    environment = os.environ if environment is None else environment
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            _put(values, Config, name[len(ENV_PREFIX) :].lower().split("__"), text)
    for name, text in (overrides or {}).items():
        if "." not in name:
            raise ConfigError(f"{name}: overrides are written section.key=value, e.g. prefill.cp=2")
        _put(values, Config, name.split("."), text)
    return config_from(values)


def _put(values: dict[str, Any], kind: Any, path: Sequence[str], text: str, above: str = "") -> None:
    """Set one value, at its path from a section of `kind` downwards.

    A path that does not exist is left to be refused by its full name.
    """
    key, *inner = path
    wanted = _kind_of(kind, key)
    if inner and _holds_keys(wanted):
        part = values.setdefault(key, {})
        if not isinstance(part, dict):
            raise ConfigError(f"{above}{key}: {part!r} holds no keys, so its {'.'.join(inner)} cannot be set")
        _put(part, wanted, inner, text, f"{above}{key}.")
    else:
        name = ".".join(path)
        values[name] = _from_text(above + name, None if inner else wanted, text)


def _kind_of(kind: Any, key: str) -> Any:
    """Return the type of a key of a section, or of a mapping from names to sections; None for an unknown key."""
    return get_args(kind)[1] if get_origin(kind) is Mapping else get_type_hints(kind).get(key)


def _holds_keys(kind: Any) -> bool:
    return is_dataclass(kind) or get_origin(kind) is Mapping


def _from_text(name: str, wanted: Any, text: str) -> Any:
    """Return the text itself where a text is wanted, else its value as YAML."""
    if wanted is None or wanted is str:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: {text!r} is not a valid value") from error


def _read_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not valid YAML: {_yaml_fault(error)}") from error
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(f"config: {path} must hold sections of keys, e.g. prefill: {{cp: 2}}")
    return {str(section): dict(part) for section, part in content.items()}


def _yaml_fault(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return str(error).splitlines()[0]


def config_from(values: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a checked configuration from plain sections."""
    sections = get_type_hints(Config)
    unknown = sorted(set(values) - set(sections))
    if unknown:
        section = unknown[0].partition(".")[0]
        raise ConfigError(f"{section}: no such section; allowed are {', '.join(sections)}")
    return Config(**{name: _section(name, sections[name], absolute_paths(name, part)) for name, part in values.items()})


def _section(name: str, kind: type[Any], values: Mapping[str, Any]) -> Any:
    types = get_type_hints(kind)
    allowed = [item.name for item in fields(kind)]
    for key in values:
        if key not in allowed:
            raise ConfigError(f"{name}.{key}: no such key; allowed are {', '.join(allowed)}")
    return kind(**{key: _typed(f"{name}.{key}", value, types[key]) for key, value in values.items()})


def _typed(name: str, value: Any, wanted: Any) -> Any:
    if get_origin(wanted) is Mapping:
        return _named_sections(name, get_args(wanted)[1], value)
    if wanted is str and value is False:
        return "off"  # for YAML 1.1, this word is no text
    if wanted is float and not isinstance(value, bool):
        try:
            return float(value)  # texts too: for YAML 1.1, 5e14 is a text
        except (TypeError, ValueError, OverflowError):
            pass
    elif isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool):
        return value
    raise ConfigError(f"{name}: {value!r} is not of type {wanted.__name__}")


def _named_sections(name: str, kind: type[Any], value: Any) -> dict[str, Any]:
    """Return sections of one kind by their names."""
    keys = ", ".join(item.name for item in fields(kind))
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {value!r} is no mapping from names to {keys}")
    for inner, part in value.items():
        if not isinstance(part, dict):
            raise ConfigError(f"{name}.{inner}: {part!r} holds no keys; allowed are {keys}")
    return {str(inner): _section(f"{name}.{inner}", kind, part) for inner, part in value.items()}

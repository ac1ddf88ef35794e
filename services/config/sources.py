"""Configuration sources, which every command reads. The environment is read here and nowhere else.

Order of precedence, highest first: `--set section.key=value`, environment `RINGSERVE_SECTION__KEY`, file, default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ringserve.cp_core.errors import ConfigError
from ringserve.services.config.tree import Config

ENV_PREFIX = "RINGSERVE_"
MAX_SHOWN = 80
"""Characters of a refused value that an error shows."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML 1.2's booleans and floats: `off` is a text, and 5e14 a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own name)
        first: [(tag, rule) for tag, rule in rules if not tag.endswith(":bool") or first in "tTfF"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def load_config(
    path: Path | None = None, overrides: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Read, merge and check the configuration. Raises ConfigError naming the key, its value and what is allowed.

    Example: `load_config(Path("cluster.yaml"), {"prefill.cp": "4"})`.
    """
    return config_from(_merge(path, overrides, environment))


def given_keys(
    section: str,
    path: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> set[str]:
    """Return the keys of a section that any source gives. Raises ConfigError.

    Example: `given_keys("decode", overrides={"decode.cp": "1"})` is {"cp"}.
    """
    values = _merge(path, overrides, environment).get(section)
    return set(values) if isinstance(values, dict) else set()


def _merge(
    path: Path | None, overrides: Mapping[str, str] | None, environment: Mapping[str, str] | None
) -> dict[str, Any]:
    values = {} if path is None else _read_file(path)
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(ENV_PREFIX) and "__" in name:
            _put(values, Config, name.removeprefix(ENV_PREFIX).lower().split("__"), text)
    for name, text in (overrides or {}).items():
        if "." not in name:
            raise ConfigError(f"{name}: overrides are written section.key=value, e.g. prefill.cp=2")
        _put(values, Config, name.split("."), text)
    return values


def config_from(values: Mapping[str, Any]) -> Config:
    """Return a checked configuration from plain sections, e.g. {"prefill": {"cp": 4}}. Raises ConfigError."""
    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors(include_url=False)[0])) from None


def keys_of(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the keys of a section; none for any other value."""
    return getattr(kind, "__pydantic_fields__", {})


def allowed(key: FieldInfo) -> str:
    """Describe the values of a key, e.g. "a whole number from 1 to 64"."""
    kind = key.annotation
    if key.title:
        return key.title
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(word or "''" for word in get_args(kind))
    if kind is bool:
        return "true or false"
    if kind is str:
        return "a text"
    bounds = {name: getattr(rule, name) for rule in key.metadata for name in ("ge", "le") if hasattr(rule, name)}
    low, high = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (bounds["ge"], bounds["le"]))
    return f"{'a whole number' if kind is int else 'a number'} from {low} to {high}"


def _read_yaml(text: str) -> Any:
    """Read one YAML document into plain Python values, never into objects. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = _read_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        fault = str(error).splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            fault = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ConfigError(f"config: {path} is not valid YAML: {fault}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} must hold sections of keys, e.g. prefill: {{cp: 2}}")
    return content


def _put(values: dict[Any, Any], kind: Any, path: Sequence[str], text: str) -> None:
    """Set one value in `values`, which holds a section of type `kind`; `path` leads from there to the key.

    A path that does not exist is refused later.
    """
    key, *inner = path
    wanted = _kind_of(kind, key)
    if inner and (keys_of(wanted) or get_origin(wanted) is Mapping):
        part = values.setdefault(key, {})
        if isinstance(part, dict):
            _put(part, wanted, inner, text)
    else:
        is_text = inner or wanted in (None, str) or get_origin(wanted) is Literal
        values[".".join(path)] = text if is_text else _parse(text)


def _parse(text: str) -> Any:
    """Return the value that the text means as YAML.

    Text that is not valid YAML is returned unchanged, and refused later.
    """
    try:
        value = _read_yaml(text)
    except yaml.YAMLError:
        return text
    return text if value is None else value


def _kind_of(kind: Any, key: str) -> Any:
    """Return the type of a key of a section, or of the sections in a mapping; None for an unknown key."""
    if get_origin(kind) is Mapping:
        return get_args(kind)[1]
    return keys_of(kind)[key].annotation if key in keys_of(kind) else None


def _sentence(error: ErrorDetails) -> str:
    """Say the key, its wrong value and the allowed ones."""
    path = [str(each) for each in error["loc"]]
    value = repr(error["input"])
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]} (and more)"
    kind: Any = Config
    above: Any = None
    info: FieldInfo | None = None
    for name in path:
        above, info, kind = kind, keys_of(kind).get(name), _kind_of(kind, name)
        if get_origin(above) is Mapping and path[-1] == "[key]":  # the name of a section is wrong, not what it holds
            path, kind, info = path[: path.index(name)], str, get_args(get_args(above)[0])[1]
            break
    key = ".".join(path)
    if kind is None:
        return _say_unknown(path, keys_of(above))
    if info is None or keys_of(kind):
        return f"{key}: {shown} holds no keys; give some of {', '.join(keys_of(kind))}"
    example = f", e.g. {info.examples[0]}" if kind is str and info.examples else ""
    return f"{key}: {shown} is not allowed; give {allowed(info)}{example}"


def _say_unknown(path: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """Name the known key that is nearest to an unknown one, or all."""
    *above, name = path
    name = name if above else name.partition(".")[0]
    key, noun = ".".join([*above, name]), "key" if above else "section"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"{key}: there is no such {noun}; did you mean {'.'.join([*above, *near])}?"
    return f"{key}: there is no such {noun}; give one of {', '.join(known)}"

"""Who comes when: drawn by chance from a rate and a mix, or read from a file. Times in seconds from the start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from cp_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKind:
    """Requests of one sort: prompts of `least_prompt` to `most_prompt` tokens, uniformly, `max_tokens` of answer."""

    name: str
    least_prompt: int
    most_prompt: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request of a trace."""

    at: float
    kind: str
    prompt_tokens: int
    max_tokens: int


KINDS = (
    RequestKind(name="short", least_prompt=64, most_prompt=192, max_tokens=32),
    RequestKind(name="long", least_prompt=16384, most_prompt=16384, max_tokens=16),
)


def draw_trace(
    *,
    kinds: Mapping[str, RequestKind],
    rate: float,
    duration: float,
    mix: Mapping[str, float],
    every: Mapping[str, float],
    seed: int,
) -> list[Arrival]:
    """Poisson arrivals of `rate` a second whose kinds are drawn by the weights of `mix`, and besides them one of each
    kind in `every` at that interval, first after half of it. The same seed gives the same trace, and the chance
    arrivals do not depend on `every`.
    """
    generator = np.random.default_rng(seed)
    names = list(mix)
    weights = np.array([mix[name] for name in names], dtype=float)
    arrivals = []
    at = 0.0
    while rate > 0:
        at += generator.exponential(1.0 / rate)
        if at >= duration:
            break
        name = names[int(generator.choice(len(names), p=weights / weights.sum()))]
        arrivals.append(_arrival(kinds[name], at, generator))
    for name, interval in every.items():
        times = np.arange(interval / 2, duration, interval)
        arrivals += [_arrival(kinds[name], float(time), generator) for time in times]
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(kind: RequestKind, at: float, generator: np.random.Generator) -> Arrival:
    prompt = int(generator.integers(kind.least_prompt, kind.most_prompt, endpoint=True))
    return Arrival(at=at, kind=kind.name, prompt_tokens=prompt, max_tokens=kind.max_tokens)


def write_trace(path: Path, trace: Sequence[Arrival]) -> None:
    """One JSON object a line. Raises ConfigError for the path."""
    try:
        path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-trace: {path} cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> list[Arrival]:
    """Raises ConfigError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from error
    trace = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise ConfigError(f"--trace: {path} holds no arrivals")
    return sorted(trace, key=lambda arrival: arrival.at)


def _read_line(path: Path, number: int, line: str) -> Arrival:
    names = ", ".join(field.name for field in fields(Arrival))
    try:
        arrival = Arrival(**json.loads(line))
        is_valid = arrival.at >= 0 and arrival.prompt_tokens >= 1 and arrival.max_tokens >= 1
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--trace: line {number} of {path} is no JSON object of {names}") from error
    if not is_valid or not isinstance(arrival.kind, str):
        raise ConfigError(
            f"--trace: line {number} of {path}: at must be 0 or more, "
            f"prompt_tokens and max_tokens 1 or more, kind a text"
        )
    return arrival

"""Parsers and formats of numbers on the command line: 128k tokens, 0.1/s, 60s."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ringserve.cp_core.errors import ConfigError

TOKENS = {"": 1, "k": 1_000, "m": 1_000_000}
SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
MAX_TOKENS = 1_000_000_000
MAX_SIZE = 4096
"""Most ranks of a ring, and most processes of a rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextShare:
    """Share (0 to 1) of turns whose prompt, cached tokens included, has `tokens` tokens."""

    tokens: int
    share: float


def parse_tokens(key: str, text: str) -> int:
    """Parse a number of tokens: "128k" is 128,000, "1m" is 1,000,000. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", text.strip().lower())
    tokens = round(float(found[1]) * TOKENS[found[2]]) if found else 0
    if not 1 <= tokens <= MAX_TOKENS:
        raise ConfigError(f"{key}: {text!r} is not a number of tokens; give one like 4096, 128k or 1m")
    return tokens


def parse_token_counts(key: str, text: str, least: int = 1) -> list[int]:
    """Parse "0,512,2k" into sorted distinct counts; 0 is allowed only if `least` is 0. Raises ConfigError."""
    return sorted({0 if least == 0 and item.strip() == "0" else parse_tokens(key, item) for item in text.split(",")})


def parse_contexts(key: str, text: str) -> tuple[ContextShare, ...]:
    """Parse contexts and their weights: "128k:9,1m:1" is nine turns of 128k for each of 1m.

    Without weights all contexts are equally frequent. Raises ConfigError.
    """
    weights: dict[int, float] = {}
    for item in text.split(","):
        size, colon, weight = item.partition(":")
        tokens = parse_tokens(key, size)
        if tokens in weights:
            raise ConfigError(f"{key}: {size!r} is given twice; give each context once")
        weights[tokens] = _positive(key, weight, "a weight like 128k:9") if colon else 1.0
    total = sum(weights.values())
    return tuple(ContextShare(tokens=tokens, share=weight / total) for tokens, weight in sorted(weights.items()))


def parse_seconds(key: str, text: str) -> float:
    """Parse a duration: "60s", "500ms", "2min". Raises ConfigError."""
    found = re.fullmatch(r"([\d.]+)\s*(ms|s|m|min|h)", text.strip().lower())
    if found is None:
        raise ConfigError(f"{key}: {text!r} is not a duration; give one like 500ms, 60s or 2min")
    return _positive(key, found[1], "a duration like 60s") * SECONDS[found[2]]


def parse_rate(key: str, text: str) -> float:
    """Parse "0.1/s", "6/min" or "360/h" into turns a second. Raises ConfigError."""
    found = re.fullmatch(r"([\d.]+)\s*/\s*(s|min|h)", text.strip().lower())
    if found is None:
        raise ConfigError(f"{key}: {text!r} is not a rate; give one like 0.1/s, 6/min or 360/h")
    return _positive(key, found[1], "a rate like 0.1/s") / SECONDS[found[2]]


def parse_sizes(key: str, text: str) -> list[int]:
    """Parse "1,2,4" into distinct sizes. Raises ConfigError."""
    sizes = [int(item) if item.isdecimal() else 0 for item in text.split(",")]
    if not all(1 <= size <= MAX_SIZE for size in sizes):
        raise ConfigError(f"{key}: {text!r} is not a list of sizes; give numbers from 1 to {MAX_SIZE}, with commas")
    return list(dict.fromkeys(sizes))


def format_seconds(seconds: float) -> str:
    """Format seconds or milliseconds with three digits."""
    if seconds >= 0.9995:
        return f"{seconds:.3g} s" if seconds < 1000.0 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.3g} ms"


def format_tokens(tokens: int) -> str:
    """Format a number of tokens in the shortest exact form: 128k, 1m, 4096."""
    for suffix, size in (("m", TOKENS["m"]), ("k", TOKENS["k"])):
        if tokens % size == 0:
            return f"{tokens // size}{suffix}"
    return str(tokens)


def _positive(key: str, text: str, allowed: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (value > 0.0 and math.isfinite(value)):
        raise ConfigError(f"{key}: {text!r} is not a number above 0; give {allowed}")
    return value

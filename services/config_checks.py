"""What one value of the configuration may be. Each raises ConfigError with key, value and what is allowed."""

from __future__ import annotations

from cp_core.errors import ConfigError


def among(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """One of a few names."""
    if value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not allowed; use one of {', '.join(allowed)}")


def within(key: str, value: float, low: float, high: float) -> None:
    """A number of a range, its ends included."""
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is out of range; allowed is {low} to {high}")


def address(key: str, value: str) -> None:
    """HOST:PORT."""
    host, colon, port = value.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) < 65536):
        raise ConfigError(f"{key}: {value!r} is no address; write HOST:PORT, e.g. 127.0.0.1:50051")

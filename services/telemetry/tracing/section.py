"""The section of the configuration that says where traces go."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from urllib.parse import urlsplit

from cp_core.errors import ConfigError

LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
"""What the extra `otel` brings."""


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """`endpoint` is a collector that takes OTLP over gRPC, as a URL: http://HOST:PORT plain, https://HOST:PORT by TLS.

    Empty: nothing is traced. `sample_ratio` of the turns are, of those whose client does not say by itself
    (`traceparent`) whether it wants to see them.
    """

    endpoint: str = ""
    sample_ratio: float = 1.0


def check_tracing(config: TracingConfig) -> None:
    """Raises ConfigError for values that cannot be meant."""
    if not 0.0 <= config.sample_ratio <= 1.0:
        raise ConfigError(f"tracing.sample_ratio: {config.sample_ratio} is out of range; allowed is 0.0 to 1.0")
    if config.endpoint and not _is_endpoint(config.endpoint):
        raise ConfigError(
            f"tracing.endpoint: {config.endpoint!r} is no collector; write http://HOST:PORT, or https:// for TLS"
        )


def check_installed(config: TracingConfig) -> None:
    """Raises ConfigError where traces are wanted and what sends them is not installed."""
    if config.endpoint and not all(map(_is_installed, LIBRARIES)):
        raise ConfigError("tracing.endpoint: traces need OpenTelemetry; install 'ringserve[otel]'")


def _is_endpoint(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname and url.port) and url.path in ("", "/")
    except ValueError:  # a port that is no number
        return False


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False

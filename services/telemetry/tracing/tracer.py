"""What gateways and leaders see of traces, whether or not anybody collects them."""

from __future__ import annotations

from typing import Protocol

from orchestration.protocol.tracing import Attributes, NoTracer, Tracer
from services.telemetry.tracing.section import TracingConfig, check_installed

CLOSE_SECONDS = 3.0
"""How long a process that ends waits for its last spans to be taken."""


class OpenSpan(Protocol):
    """Something that has begun. `trace_parent` is for whoever does a part of it; empty where it is not collected."""

    @property
    def trace_parent(self) -> str: ...

    def note(self, attributes: Attributes) -> None:
        """Say more about it."""

    def end(self, error: str = "") -> None:
        """It is over; `error` is why it failed."""


class ServiceTracer(Tracer, Protocol):
    """A process's door to the collector."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        """Begin what was begun at `began` (`time.monotonic`), as a part of a client's trace if there is one."""

    def close(self) -> None:
        """Send what is left, within CLOSE_SECONDS. May block."""


class _NoSpan:
    trace_parent = ""

    def note(self, attributes: Attributes) -> None:
        """Nobody asked."""

    def end(self, error: str = "") -> None:
        """Nobody asked."""


NO_SPAN = _NoSpan()


class NoServiceTracer(NoTracer):
    """Where no traces are collected."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        return NO_SPAN

    def close(self) -> None:
        """Nothing is open."""


def tracer_for(config: TracingConfig, process: str) -> ServiceTracer:
    """That of a process, e.g. "prefill-0". Raises ConfigError where the extra `otel` is needed and not installed."""
    if not config.endpoint:
        return NoServiceTracer()
    check_installed(config)
    from services.telemetry.tracing.otel import OtelTracer, exporter_to

    return OtelTracer(exporter_to(config.endpoint), process=process, sample_ratio=config.sample_ratio)

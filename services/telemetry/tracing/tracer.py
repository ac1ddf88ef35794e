"""Traces of turns for gateways and leaders, with or without a collector."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Protocol

from pydantic import ConfigDict, Field, StrictFloat
from pydantic.dataclasses import dataclass

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.turns import Attributes, BegunTurn, NoTracer, TimeSpan, Tracer
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.decode_commands import FinishReason

CLOSE_SECONDS = 3.0
"""Seconds for a process that ends to send its last spans."""


class OpenSpan(Protocol):
    """Span that has begun. `trace_parent` is for those who record a part of it; empty where nothing is collected."""

    @property
    def trace_parent(self) -> str: ...

    def note(self, attributes: Attributes) -> None:
        """Add attributes."""

    def end(self, error: str = "") -> None:
        """End the span; `error` is why it failed."""


class ServiceTracer(Tracer, Protocol):
    """Tracer of a process."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        """Begin a span at `began` (`time.monotonic`), as a part of the client's trace if there is one."""

    def close(self) -> None:
        """Send the remaining spans, within CLOSE_SECONDS. May block."""


class _NoSpan:
    trace_parent = ""

    def note(self, attributes: Attributes) -> None:
        """Do nothing."""

    def end(self, error: str = "") -> None:
        """Do nothing."""


NO_SPAN = _NoSpan()


class NoServiceTracer(NoTracer):
    """Tracer that collects nothing."""

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        return NO_SPAN

    def close(self) -> None:
        """Do nothing."""


def tracer_for(config: TracingConfig, process: str) -> ServiceTracer:
    """Return the tracer of a process, e.g. "prefill-0".

    Raises ConfigError where the extra `otel` is needed and missing.
    """
    if not config.endpoint:
        return NoServiceTracer()
    check_installed(config)
    from ringserve.services.telemetry.tracing.otel import OtelTracer, exporter_to

    return OtelTracer(exporter_to(config.endpoint), process=process, sample_ratio=config.sample_ratio)


LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
"""Libraries of the extra `otel`."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class TracingConfig:
    """Traces of turns, sent to a collector."""

    endpoint: str = Field(
        default="",
        pattern=r"^(https?://[^/\s]+:([0-5]?[0-9]{1,4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])/?)?$",
        title="http://HOST:PORT, https://HOST:PORT for TLS, or '' for no traces",
        description="Collector that takes OTLP over gRPC.",
        examples=["http://collector:4317"],
    )
    sample_ratio: StrictFloat = Field(
        default=1.0,
        ge=0.0,
        le=1.0,
        description="Share of the turns that are traced if the client does not decide (traceparent).",
        examples=[0.1],
    )


def check_installed(config: TracingConfig) -> None:
    """Check that the libraries are there if traces are wanted. Raises ConfigError."""
    if config.endpoint and not all(map(_is_installed, LIBRARIES)):
        raise ConfigError("tracing.endpoint: traces need OpenTelemetry; install 'ringserve[otel]'")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package that it is in
        return False


FINISHED = tuple(reason.value for reason in FinishReason)


class TurnTrace:
    """Span of a turn, from the client's request to the last response. `parent` is for those who record a part of it.

    It holds numbers and our own names, and nothing of prompt or answer. Its own part is `plan`: until the router has
    chosen the rings and they have reserved. The rings record theirs.
    """

    def __init__(self, tracer: ServiceTracer, trace_parent: str, request_id: str, tenant: str, began: float) -> None:
        """Begin the span at `began` (`time.monotonic`). `trace_parent` is the client's."""
        attributes = {"ringserve.request_id": request_id, **({"ringserve.tenant": tenant} if tenant else {})}
        self._tracer = tracer
        self._asked_at = time.monotonic()
        self._span = tracer.begin("turn", trace_parent, began, attributes)

    @property
    def parent(self) -> str:
        return self._span.trace_parent

    def planned(self, begun: BegunTurn) -> None:
        """Note the plan of the router."""
        plan = begun.plan
        self._span.note(
            {
                "gen_ai.usage.input_tokens": begun.prompt_tokens,
                "ringserve.turn_id": begun.turn_id,
                "ringserve.algorithm": plan.algorithm.value,
                "ringserve.new_tokens": plan.new_tokens,
                "ringserve.cached_tokens": plan.cached_tokens,
                "ringserve.prefill_ring": plan.prefill_ring,
                "ringserve.decode_ring": plan.decode_ring,
            }
        )
        self._tracer.record(self.parent, [TimeSpan(name="plan", began=self._asked_at, ended=time.monotonic())])

    def completed(self, complete: inference_pb2.GenerateComplete) -> None:
        """Note the length and the TTFT of the answer."""
        self._span.note(
            {
                "gen_ai.usage.output_tokens": complete.usage.completion_tokens,
                "ringserve.time_to_first_token_seconds": complete.ttft_seconds,
            }
        )

    def ended(self, outcome: str) -> None:
        """End the span with a finish reason, or the gRPC status of an error in lower case."""
        self._span.note({"ringserve.outcome": outcome})
        self._span.end("" if outcome in FINISHED else outcome)

"""Traces of turns by OpenTelemetry, sent to a collector by OTLP over gRPC. Gateways and ring leaders record them.

Without a collector, OpenTelemetry's API is a no-op. Only a process with `tracing.endpoint` loads the
SDK (extra `otel`). Certificates and headers for the collector come from OpenTelemetry's own environment variables
(OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_HEADERS and so on), where its users expect them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from opentelemetry.context import Context
from opentelemetry.trace import (
    NoOpTracerProvider,
    Span,
    SpanKind,
    Status,
    StatusCode,
    format_trace_id,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.turns import Attributes, BegunTurn, TimeSpan
from ringserve.services.telemetry.metrics.registry import package_version
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import FinishReason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

CLOSE_SECONDS = 3.0
"""Time that an ending process has to send its last spans, in seconds."""
EXPORT_SECONDS = 10.0
"""Timeout of one batch with all its retries, in seconds. A thread sends it; the queue before it is bounded."""
LIBRARIES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
"""Libraries of the extra `otel`."""
TRACE_PARENT = "traceparent"

log = logging.getLogger(__name__)


def make_tracer(endpoint: str, sample_ratio: float, process: str) -> SpanTracer:
    """Make the tracer of a process, for example "prefill-0". An empty endpoint collects nothing.

    Raises ConfigError if the extra `otel` is missing.
    """
    if not endpoint:
        return SpanTracer()
    check_installed(endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_SECONDS)
    return SpanTracer(exporter, process=process, sample_ratio=sample_ratio)


def check_installed(endpoint: str) -> None:
    """Raise ConfigError if there is an endpoint for traces and their libraries are missing."""
    if endpoint and not all(map(_is_installed, LIBRARIES)):
        raise ConfigError("tracing.endpoint: traces need OpenTelemetry; install 'ringserve[otel]'")


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


class SpanTracer:
    """Process tracer, with its own provider: there is no global one. Without an exporter it collects nothing."""

    def __init__(self, exporter: SpanExporter | None = None, *, process: str = "", sample_ratio: float = 1.0) -> None:
        self._exporter, self._provider = exporter, None
        self._context = TraceContextTextMapPropagator()
        if exporter is None:
            self._tracer = NoOpTracerProvider().get_tracer("ringserve")
            return
        from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        described = {SERVICE_NAME: "ringserve", SERVICE_INSTANCE_ID: process, SERVICE_VERSION: package_version()}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(described),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ringserve", package_version())

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> Span:
        """Begin a span at `began` (`time.monotonic`), as part of the client's trace if `trace_parent` is valid."""
        parent = self._parent(trace_parent) if trace_parent and self._provider else Context()
        start = _epoch_ns(began, _offset())
        return self._tracer.start_span(name, parent, kind=SpanKind.SERVER, attributes=attributes, start_time=start)

    def trace_parent(self, span: Span) -> str:
        """Return the W3C header for spans that are parts of `span`; empty if nothing is collected."""
        carrier: dict[str, str] = {}
        if span.is_recording():
            self._context.inject(carrier, set_span_in_context(span, Context()))
        return carrier.get(TRACE_PARENT, "")

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Record spans that have ended, see `orchestration.protocol.turns.Tracer`."""
        if trace_parent:
            self._record(self._parent(trace_parent), spans, _offset())

    def flush(self) -> None:
        """Send the spans that have ended. Blocks."""
        if self._provider is not None:
            self._provider.force_flush()

    def close(self) -> None:
        """Send the remaining spans within CLOSE_SECONDS. Blocks. The SDK would wait ten times as long."""
        if self._provider is None or self._exporter is None:
            return
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            log.warning("the collector did not accept the last spans within %.0f s", CLOSE_SECONDS)
            self._exporter.shutdown()

    def _parent(self, trace_parent: str) -> Context:
        return self._context.extract({TRACE_PARENT: trace_parent}, Context())

    def _record(self, parent: Context, spans: Sequence[TimeSpan], offset: int) -> None:
        for each in spans:
            attributes, began = each.attributes, _epoch_ns(each.began, offset)
            span = self._tracer.start_span(each.name, parent, attributes=attributes, start_time=began)
            self._record(set_span_in_context(span, parent), each.parts, offset)
            span.end(_epoch_ns(each.ended, offset))


def _offset() -> int:
    """Return nanoseconds from the epoch to the zero of `time.monotonic`. It changes when the system clock is set."""
    return time.time_ns() - time.monotonic_ns()


def _epoch_ns(moment: float, offset: int) -> int:
    """Convert a moment of `time.monotonic` to nanoseconds since the epoch."""
    return round(moment * 1e9) + offset


FINISHED = tuple(reason.value for reason in FinishReason)


class TurnTrace:
    """Turn span, from the client's request to the last response. `parent` is the header for parts of it.

    It holds only numbers and ringserve's own names, never text of a prompt or answer. The gateway records the part
    `plan`, which ends when the router has chosen rings and the rings have reserved room. The rings record their parts.
    """

    def __init__(self, tracer: SpanTracer, trace_parent: str, request_id: str, tenant: str, began: float) -> None:
        """Begin the span at `began` (`time.monotonic`). `trace_parent` is the client's."""
        attributes = {"ringserve.request_id": request_id, **({"ringserve.tenant": tenant} if tenant else {})}
        self._tracer = tracer
        self._asked_at = time.monotonic()
        self._span = tracer.begin("turn", trace_parent, began, attributes)

    @property
    def parent(self) -> str:
        """Header for spans that are parts of this one."""
        return self._tracer.trace_parent(self._span)

    @property
    def trace_id(self) -> str:
        """Trace id, 32 hexadecimal digits; empty if it is not collected."""
        context = self._span.get_span_context()
        return format_trace_id(context.trace_id) if self._span.is_recording() else ""

    def planned(self, begun: BegunTurn) -> None:
        """Note the plan of the router."""
        plan = begun.plan
        self._span.set_attributes(
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
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": complete.usage.completion_tokens,
                "ringserve.time_to_first_token_seconds": complete.ttft_seconds,
            }
        )

    def ended(self, outcome: str) -> None:
        """End the span with a finish reason, or the gRPC status of an error in lower case."""
        self._span.set_attribute("ringserve.outcome", outcome)
        if outcome not in FINISHED:
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end()

"""Spans by OpenTelemetry's SDK, to a collector by OTLP over gRPC.

Certificates and headers for the collector come from the environment, by OpenTelemetry's own names
(OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_EXPORTER_OTLP_HEADERS and so on): that is where its users expect them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ringserve.orchestration.protocol.turns import Attributes, TimeSpan
from ringserve.services.telemetry.metrics.registry import package_version
from ringserve.services.telemetry.tracing.tracer import CLOSE_SECONDS, NO_SPAN, OpenSpan

log = logging.getLogger(__name__)

EXPORT_SECONDS = 10.0
"""Seconds for one batch with all its retries. It is sent in a thread; the queue before it is bounded."""
TRACE_PARENT = "traceparent"


def exporter_to(endpoint: str) -> SpanExporter:
    """Return an exporter to a collector's URL, see `TracingConfig`."""
    return OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=EXPORT_SECONDS)


class OtelTracer:
    """`ServiceTracer` with a provider of its own: the process has no global one."""

    def __init__(self, exporter: SpanExporter, *, process: str, sample_ratio: float = 1.0) -> None:
        described = {SERVICE_NAME: "ringserve", SERVICE_INSTANCE_ID: process, SERVICE_VERSION: package_version()}
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(described),
            shutdown_on_exit=False,
        )
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ringserve", package_version())
        self._context = TraceContextTextMapPropagator()

    def begin(self, name: str, trace_parent: str, began: float, attributes: Attributes) -> OpenSpan:
        """Begin a span, see `ServiceTracer`. An invalid `trace_parent` begins a trace of its own, as W3C prescribes."""
        parent = self._parent(trace_parent) if trace_parent else Context()
        span = self._tracer.start_span(
            name, parent, kind=SpanKind.SERVER, attributes=attributes, start_time=_epoch_ns(began, _offset())
        )
        if not span.is_recording():
            return NO_SPAN
        carrier: dict[str, str] = {}
        self._context.inject(carrier, set_span_in_context(span, Context()))
        return _Open(span, carrier[TRACE_PARENT])

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Record spans that have ended, see `Tracer`."""
        if trace_parent:
            self._record(self._parent(trace_parent), spans, _offset())

    def flush(self) -> None:
        """Send the spans that have ended. Blocks."""
        self._provider.force_flush()

    def close(self) -> None:
        """Close, see `ServiceTracer`. The SDK itself would wait ten times as long for a lost collector."""
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            log.warning("the collector did not take the last spans within %.0f s", CLOSE_SECONDS)
            self._exporter.shutdown()

    def _parent(self, trace_parent: str) -> Context:
        return self._context.extract({TRACE_PARENT: trace_parent}, Context())

    def _record(self, parent: Context, spans: Sequence[TimeSpan], offset: int) -> None:
        for each in spans:
            attributes, began = each.attributes, _epoch_ns(each.began, offset)
            span = self._tracer.start_span(each.name, parent, attributes=attributes, start_time=began)
            self._record(set_span_in_context(span, parent), each.parts, offset)
            span.end(_epoch_ns(each.ended, offset))


class _Open:
    def __init__(self, span: Span, trace_parent: str) -> None:
        self._span = span
        self.trace_parent = trace_parent

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end(self, error: str = "") -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


def _offset() -> int:
    """Return nanoseconds from the epoch to the zero of `time.monotonic`; read each time, as clocks are set."""
    return time.time_ns() - time.monotonic_ns()


def _epoch_ns(moment: float, offset: int) -> int:
    """Return a moment of `time.monotonic` in nanoseconds since the epoch."""
    return round(moment * 1e9) + offset

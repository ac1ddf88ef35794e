"""Export of spans by OTLP: to a collector, to an unreachable collector, and without a collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Status, StatusCode

from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.protocol.turns import TimeSpan
from ringserve.services.config import config_from
from ringserve.services.config.sections import TracingConfig
from ringserve.services.gateway.settings import GatewaySettings
from ringserve.services.telemetry import tracing
from ringserve.services.telemetry.tracing import SpanTracer, check_installed, make_tracer
from tests.waiting import WAIT_SECONDS

Request = trace_service_pb2.ExportTraceServiceRequest


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes OTLP on loopback."""

    def __init__(self) -> None:
        self.requests: Queue[Request] = Queue()
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request: Request, context: grpc.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        self.requests.put(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(0).wait(WAIT_SECONDS)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def test_spans_reach_a_collector_by_otlp_with_who_sent_them(collector: Collector) -> None:
    tracer = make_tracer(collector.endpoint, 1.0, "prefill-3")
    now = time.monotonic()
    turn = tracer.begin("turn", "", now - 2.0, {"ringserve.request_id": "r"})
    chunk = TimeSpan(name="chunk", began=now - 1.0, ended=now - 0.5, attributes={"ringserve.tokens.stop": 7})
    tracer.record(tracer.trace_parent(turn), [TimeSpan(name="prefill", began=now - 1.0, ended=now, parts=(chunk,))])
    turn.set_status(Status(StatusCode.ERROR, "unavailable"))
    turn.end()
    tracer.close()
    (sent,) = collector.requests.get(timeout=WAIT_SECONDS).resource_spans
    resource = {each.key: each.value.string_value for each in sent.resource.attributes}
    assert (resource["service.name"], resource["service.instance.id"]) == ("ringserve", "prefill-3")
    spans = {span.name: span for span in sent.scope_spans[0].spans}
    assert spans.keys() == {"turn", "prefill", "chunk"}
    assert len({span.trace_id for span in spans.values()}) == 1
    assert spans["prefill"].parent_span_id == spans["turn"].span_id
    assert spans["chunk"].parent_span_id == spans["prefill"].span_id
    assert spans["chunk"].end_time_unix_nano - spans["chunk"].start_time_unix_nano == pytest.approx(5e8, abs=1e3)
    assert abs(spans["prefill"].end_time_unix_nano - time.time_ns()) < 60e9
    assert spans["turn"].status.message == "unavailable"


def test_a_collector_that_is_away_holds_up_neither_turns_nor_the_end(collector: Collector) -> None:
    collector.close()
    tracer = make_tracer(collector.endpoint, 1.0, "gateway")
    for _ in range(5_000):  # more than the queue holds
        tracer.begin("turn", "", time.monotonic(), {}).end()
    tracer.close()


def test_an_export_that_never_ends_holds_up_neither_turns_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit of `close` this test would hang."""
    monkeypatch.setattr(tracing, "CLOSE_SECONDS", 0.1)
    exporting, may_end = threading.Event(), threading.Event()

    class Stuck(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            exporting.set()
            may_end.wait()
            return super().export(spans)

    tracer = SpanTracer(Stuck(), process="gateway")
    for _ in range(5_000):
        tracer.begin("turn", "", time.monotonic(), {}).end()
    tracer.close()
    assert exporting.is_set()
    may_end.set()


def test_nothing_is_told_and_nothing_loaded_without_an_endpoint() -> None:
    tracer = make_tracer("", 1.0, "gateway")
    span = tracer.begin("turn", f"00-{'1' * 32}-{'2' * 16}-01", 0.0, {})
    assert tracer.trace_parent(span) == ""
    span.set_attributes({"x": 1})
    span.end()
    tracer.record("", [TimeSpan(name="x", began=0.0, ended=1.0)])
    tracer.close()


def test_an_endpoint_without_the_extra_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("opentelemetry.nothing_here", "nothing_at_all.here"):
        monkeypatch.setattr(tracing, "LIBRARIES", ("opentelemetry.sdk", missing))
        check_installed("")
        for refuse in (check_installed, lambda endpoint: make_tracer(endpoint, 1.0, "gateway")):
            with pytest.raises(
                ConfigError, match=r"tracing.endpoint: traces need OpenTelemetry; install 'ringserve\[otel\]'"
            ):
                refuse("http://127.0.0.1:4317")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4317", "grpc://h:1", "http://h", "http://:1", "http://h:x", "http://h:70000", "http://h:1/v1"],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing.endpoint: .* is not allowed; give http://HOST:PORT"):
        config_from({"tracing": {"endpoint": endpoint}})


def test_a_gateway_process_is_told_where_its_traces_go() -> None:
    settings = GatewaySettings(
        listen="a:1",
        http="",
        metrics="",
        router="a:2",
        model="m",
        model_name="",
        dtype="float32",
        device="cpu",
        max_seconds=1.0,
        tracing=TracingConfig(endpoint="https://collector:4317", sample_ratio=0.5),
    )
    assert GatewaySettings.from_json(settings.to_json()) == settings

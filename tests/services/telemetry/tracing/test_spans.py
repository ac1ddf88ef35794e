"""Trace of a turn: from the client's own span to the chunks on the rings, and never its text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.openmetrics import exposition as openmetrics

from ringserve.mapping import enum_name
from ringserve.orchestration.protocol.rings import PrefillScheduling
from ringserve.services.gateway.text import TextCodec
from ringserve.services.telemetry.tracing import SpanTracer
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.orchestration.service import Service
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.waiting import eventually
from tests.workers.models import random_tokens

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
CHUNKED = PrefillScheduling(step_budget=64.0, min_chunk_tokens=16)
RINGS = {"pull", "queue", "prefill", "chunk", "hand-over", "migration", "hand-off", "decode"}


@dataclass(frozen=True)
class Traced:
    """LocalGateway whose spans stay in memory."""

    gateway: LocalGateway
    tracer: SpanTracer
    exporter: InMemorySpanExporter

    async def generate(self, trace_parent: str = "", **fields: Any) -> inference_pb2.GenerateComplete:
        """One turn over gRPC, to its end."""
        tokens = fields.pop("tokens", random_tokens(150))
        request = inference_pb2.GenerateRequest(
            tokenized=inference_pb2.TokenizedInput(input_ids=tokens),
            sampling_params=inference_pb2.SamplingParams(max_tokens=fields.pop("max_tokens", 6), temperature=0),
            **fields,
        )
        metadata = (("traceparent", trace_parent),) if trace_parent else ()
        async with self.gateway.channel() as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            *_, last = [each async for each in stub.Generate(request, metadata=metadata, timeout=CALL_SECONDS)]
            return last.complete  # type: ignore[no-any-return]

    async def spans(self) -> list[ReadableSpan]:
        """Return the spans of all turns so far, when the last of them has been released everywhere."""
        await self.gateway.wait_idle()
        prefill = self.gateway.service.prefill
        await eventually(lambda: not prefill.num_turns and not self.gateway.service.decode.num_turns)
        self.tracer.flush()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[SpanTracer]:
    tracer = SpanTracer(exporter, process="test")
    yield tracer
    tracer.close()


@pytest.fixture
async def traced(
    model_path: Path, codec: TextCodec, tracer: SpanTracer, exporter: InMemorySpanExporter
) -> AsyncIterator[Traced]:
    service = Service(model_path, 2, 3, scheduling=CHUNKED)
    async with LocalGateway(model_path, codec, tracer=tracer, service=service) as gateway:
        yield Traced(gateway, tracer, exporter)


def named(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def only(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    (span,) = named(spans, name)
    return span


def parent_of(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_a_turn_is_one_trace_below_the_clients_span(traced: Traced) -> None:
    done = await traced.generate(SAMPLED, request_id="r-1")
    spans = await traced.spans()
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    turn = only(spans, "turn")
    assert parent_of(turn) == PARENT
    assert {span.name for span in spans} == {"turn", "plan"} | RINGS - {"pull"}
    for span in spans:
        if span.name not in ("turn", "chunk"):
            assert parent_of(span) == id_of(turn), span.name

    attributes = dict(turn.attributes or {})
    assert attributes["ringserve.request_id"] == "r-1"
    assert attributes["ringserve.algorithm"] == enum_name(inference_pb2.Algorithm, done.plan.algorithm)
    assert attributes["ringserve.prefill_ring"] == "prefill-0"
    assert attributes["ringserve.decode_ring"] == "decode-0"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (150, 6)
    assert attributes["ringserve.outcome"] == "length"
    assert turn.status.status_code is StatusCode.UNSET
    assert (only(spans, "decode").attributes or {})["ringserve.tokens"] == 6
    migration = dict(only(spans, "migration").attributes or {})
    assert migration["ringserve.bytes"] == done.plan.migrated_bytes
    page = openmetrics.generate_latest(traced.gateway.metrics.registry).decode()
    assert page.count(f'# {{trace_id="{TRACE}"}}') == 2, "its first token and its whole"


async def test_chunks_are_parts_of_the_prefill_and_cover_the_new_tokens(traced: Traced) -> None:
    done = await traced.generate()
    spans = await traced.spans()
    prefill = only(spans, "prefill")
    chunks = sorted(named(spans, "chunk"), key=times)
    assert len(chunks) == len(done.plan.chunks) > 1
    reached = 0
    for chunk in chunks:
        attributes = dict(chunk.attributes or {})
        assert attributes["ringserve.tokens.start"] == reached
        reached = attributes["ringserve.tokens.stop"]  # type: ignore[assignment]
        assert parent_of(chunk) == id_of(prefill)
        assert times(prefill)[0] <= times(chunk)[0] <= times(chunk)[1] <= times(prefill)[1]
    assert reached == 150
    # One after the other, and all within the turn; clocks of one machine are read twice, so a little apart.
    order = [only(spans, name) for name in ("queue", "prefill", "decode")]
    assert [span.name for span in sorted(order, key=times)] == ["queue", "prefill", "decode"]
    began, ended = times(only(spans, "turn"))
    for span in order:
        assert began - 1e6 <= times(span)[0] <= times(span)[1] <= ended + 1e9


async def test_a_follow_up_tells_what_it_pulled(traced: Traced) -> None:
    await traced.generate(conversation_id="c")
    (await traced.spans()).clear()
    traced.exporter.clear()
    done = await traced.generate(conversation_id="c", tokens=[5, 6, 7], prompt_mode=inference_pb2.PROMPT_MODE_APPEND)
    spans = await traced.spans()
    assert done.plan.pulled_bytes > 0
    assert (only(spans, "pull").attributes or {})["ringserve.bytes"] == done.plan.pulled_bytes
    assert (only(spans, "turn").attributes or {})["ringserve.cached_tokens"] == done.usage.cached_tokens > 150


async def test_a_turn_that_the_decode_ring_computes_tells_of_no_other_ring(
    model_path: Path, codec: TextCodec, tracer: SpanTracer, exporter: InMemorySpanExporter
) -> None:
    service = Service(model_path, 2, 3, max_direct_tokens=32)
    async with LocalGateway(model_path, codec, tracer=tracer, service=service) as gateway:
        traced = Traced(gateway, tracer, exporter)
        await traced.generate(conversation_id="c")
        await traced.spans()
        exporter.clear()
        append, direct = inference_pb2.PROMPT_MODE_APPEND, inference_pb2.ALGORITHM_DECODE_RING
        done = await traced.generate(
            SAMPLED,
            conversation_id="c",
            tokens=[5, 6],
            prompt_mode=append,
            algorithm=direct,
        )
        spans = await traced.spans()
    turn = only(spans, "turn")
    assert sorted(span.name for span in spans) == ["decode", "hand-off", "plan", "prefill", "queue", "turn"]
    assert (turn.attributes or {})["ringserve.algorithm"] == "decode_ring"
    for name in ("queue", "prefill", "hand-off", "decode"):
        assert parent_of(only(spans, name)) == id_of(turn)
        assert (only(spans, name).attributes or {})["ringserve.ring"] == "decode-0"
    prefill = only(spans, "prefill").attributes or {}
    computed = prefill["ringserve.tokens.stop"] - prefill["ringserve.tokens.start"]  # type: ignore[operator]
    assert computed == done.plan.new_tokens == 3  # and the last token of the answer before, which had no KV
    assert times(only(spans, "queue"))[1] <= times(only(spans, "prefill"))[0] <= times(only(spans, "decode"))[0]


async def test_over_http_it_is_the_same_trace(traced: Traced) -> None:
    async with httpx2.AsyncClient(base_url=traced.gateway.url, timeout=CALL_SECONDS) as http:
        body = {"model": MODEL, "prompt": "secret words", "max_tokens": 40}
        answer = await http.post("/v1/completions", json=body, headers={"traceparent": SAMPLED})
        assert answer.status_code == 200
    spans = await traced.spans()
    assert parent_of(only(spans, "turn")) == PARENT
    assert RINGS - {"pull"} <= {span.name for span in spans}
    told = " ".join(span.to_json() for span in spans)
    assert "secret" not in told
    text = answer.json()["choices"][0]["text"]
    assert len(text) > 20, "a short text stands in other words"
    assert text not in told


@pytest.mark.parametrize("sent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "x" * 5000])
async def test_without_a_trace_of_the_client_a_turn_begins_its_own(traced: Traced, sent: str) -> None:
    await traced.generate(sent)
    turn = only(await traced.spans(), "turn")
    assert turn.parent is None
    assert turn.context is not None
    assert f"{turn.context.trace_id:032x}" != TRACE


async def test_a_client_that_does_not_want_its_trace_gets_none(traced: Traced) -> None:
    await traced.generate(f"00-{TRACE}-{PARENT}-00")
    assert await traced.spans() == []


async def test_of_a_ratio_of_nothing_only_what_clients_want_is_told(
    model_path: Path, codec: TextCodec, exporter: InMemorySpanExporter
) -> None:
    tracer = SpanTracer(exporter, process="test", sample_ratio=0.0)
    async with LocalGateway(model_path, codec, tracer=tracer) as gateway:
        traced = Traced(gateway, tracer, exporter)
        await traced.generate()
        assert await traced.spans() == []
        await traced.generate(SAMPLED)
        assert RINGS - {"pull"} <= {span.name for span in await traced.spans()}
    tracer.close()


async def test_a_refused_turn_is_an_error_without_rings(traced: Traced) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await traced.generate(conversation_id="never", prompt_mode=inference_pb2.PROMPT_MODE_APPEND)
    spans = await traced.spans()
    turn = only(spans, "turn")
    assert [span.name for span in spans] == ["turn"]
    assert (turn.status.status_code, turn.status.description) == (StatusCode.ERROR, "not_found")


async def test_a_turn_whose_client_hangs_up_still_tells_how_far_it_came(traced: Traced) -> None:
    request = inference_pb2.GenerateRequest(
        text="x", sampling_params=inference_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)
    )
    async with traced.gateway.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(request, timeout=CALL_SECONDS)
        chunks = 0
        async for response in call:
            chunks += response.HasField("chunk")
            if chunks == 3:
                break
        call.cancel()
    spans = await traced.spans()
    assert (only(spans, "turn").attributes or {})["ringserve.outcome"] == "cancelled"
    assert 3 <= (only(spans, "decode").attributes or {})["ringserve.tokens"] < 4000  # type: ignore[operator]

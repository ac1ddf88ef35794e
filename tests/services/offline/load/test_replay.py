"""Arrivals at random and from a file, their replay against a scripted gateway, and its summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from ringserve.services.cli.main import main
from ringserve.services.offline.load.replay import Arrival, Outcome, replay
from ringserve.services.offline.load.summary import Bounds, PredictionErrors, summarize
from ringserve.v1 import inference_pb2

END = 5
VOCABULARY = 40


class Gateway:
    """Gateway that refuses prompts of 13 tokens and answers the others, two tokens at a time, once two have arrived."""

    def __init__(self) -> None:
        self.seen: list[inference_pb2.GenerateRequest] = []
        self.both_came = asyncio.Event()

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Any
    ) -> inference_pb2.GetModelInfoResponse:
        return inference_pb2.GetModelInfoResponse(vocab_size=VOCABULARY, eos_token_ids=[END])

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.seen.append(request)
        if len(request.tokenized.input_ids) == 13:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        if sum(len(each.tokenized.input_ids) != 13 for each in self.seen) == 2:
            self.both_came.set()
        await self.both_came.wait()
        yield inference_pb2.GenerateResponse(start=inference_pb2.GenerateStart())
        for tokens in ([1, 2], [3, 4]):
            yield inference_pb2.GenerateResponse(chunk=inference_pb2.GenerateStreamChunk(token_ids=tokens))
        plan = inference_pb2.Plan(queue_seconds=0.25)
        yield inference_pb2.GenerateResponse(complete=inference_pb2.GenerateComplete(plan=plan))


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Gateway, str]]:
    server, gateway = grpc.aio.server(), Gateway()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "GetModelInfo": grpc.unary_unary_rpc_method_handler(
            gateway.GetModelInfo,
            inference_pb2.GetModelInfoRequest.FromString,
            inference_pb2.GetModelInfoResponse.SerializeToString,
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            gateway.Generate,
            inference_pb2.GenerateRequest.FromString,
            inference_pb2.GenerateResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ringserve.v1.Inference", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield gateway, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def arrival(prompt_tokens: int, at: float = 0.0, kind: str = "short") -> Arrival:
    return Arrival(at=at, kind=kind, prompt_tokens=prompt_tokens, max_tokens=4)


async def test_requests_do_not_wait_for_each_other_and_failures_are_counted() -> None:
    """Hold the first request until the second arrives: a load that waited would never end."""
    statuses: list[str] = []
    async with serving() as (gateway, target):
        outcomes = await replay(target, [arrival(7), arrival(13, 0.01), arrival(9, 0.02)], 30.0, 1, statuses.append)
    assert [outcome.status for outcome in outcomes] == ["ok", "resource_exhausted", "ok"]
    assert sorted(statuses) == ["ok", "ok", "resource_exhausted"]
    assert [outcome.num_tokens for outcome in outcomes] == [4, 0, 4]
    assert [len(outcome.gaps) for outcome in outcomes] == [3, 0, 3]
    first = outcomes[0]
    assert first.ttft is not None
    assert first.ttft >= 0.015, "the gateway held it until the third request, 20 ms later"
    assert (first.queue, outcomes[1].ttft) == (0.25, None)
    for request in gateway.seen:
        assert END not in request.tokenized.input_ids
        assert max(request.tokenized.input_ids) < VOCABULARY
        assert (request.sampling_params.max_tokens, request.sampling_params.ignore_eos) == (4, True)


async def test_a_request_past_its_deadline_is_counted_as_such() -> None:
    async with serving() as (_, target):
        (outcome,) = await replay(target, [arrival(7)], 0.05, 0)
    assert (outcome.status, outcome.ttft, outcome.reason) == ("deadline_exceeded", None, "Deadline Exceeded")


def outcome(kind: str, ttft: float | None, gaps: list[float], sent: float, ended: float, status: str = "ok") -> Outcome:
    return Outcome(arrival(100, sent, kind), sent, ended, ttft, 0.0, gaps, len(gaps) + (ttft is not None), status)


def test_summaries_are_by_kind_and_of_all() -> None:
    outcomes = [
        outcome("short", 0.1, [0.1, 0.3], 0.0, 2.0),
        outcome("short", 3.0, [0.1], 1.0, 5.0),
        outcome("long", None, [], 2.0, 4.0, "unavailable"),
        outcome("long", 1.0, [], 2.0, 6.0),
    ]
    outcomes[2].reason = "no decode ring is ready"
    report = summarize(outcomes, Bounds(ttft=1.0, ttit=0.15), "test")
    assert report.notes == ("unavailable, for example: no decode ring is ready",)
    assert [(each.kind, each.requests, each.statuses) for each in report.kinds] == [
        ("long", 2, {"unavailable": 1, "ok": 1}),
        ("short", 2, {"ok": 2}),
        ("all", 4, {"ok": 3, "unavailable": 1}),
    ]
    assert [each.good for each in report.kinds] == [0.5, 0.0, 0.25], "0.2 s on average between tokens is too long"
    assert report.seconds == 6.0
    assert report.requests_per_second == 0.5
    assert report.good_requests_per_second == pytest.approx(1 / 6)
    assert report.prompt_tokens_per_second == 50
    assert report.completion_tokens_per_second == 1.0
    assert report.kinds[1].ttit.most == 0.3


def test_errors_of_predictions_are_those_of_the_first_turns_in_time_and_of_later_ones() -> None:
    turns = [outcome("a", 0.1, [], float(number), 9.0) for number in range(14)]
    for number, turn in enumerate(turns):
        turn.prefill = (0.5, 1.0) if number < 10 else (1.1, 1.0)
    lost = outcome("a", None, [], 0.5, 9.0, "unavailable")
    lost.prefill = (9.0, 1.0)
    errors = PredictionErrors.of([lost, *reversed(turns)])
    assert errors is not None
    assert errors.first == pytest.approx(0.5)
    assert errors.later == pytest.approx(0.1)
    few = PredictionErrors.of(turns[:3])
    assert few is not None
    assert few.later is None
    assert PredictionErrors.of([lost, outcome("a", 0.1, [], 0.0, 1.0)]) is None, "a turn on no prefill ring has none"


async def test_the_command_prints_the_report_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as (gateway, target):
        trace, plot = tmp_path / "trace.jsonl", tmp_path / "load.png"
        lines = [{"at": 0, "kind": "a", "prompt_tokens": 5, "max_tokens": 4}] * 2
        trace.write_text("\n".join(map(json.dumps, lines)))
        arguments = ["bench", "load", "--target", target, "--trace", str(trace), "--json", "--plot", str(plot)]
        assert await asyncio.to_thread(main, arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(kind["kind"], kind["statuses"]) for kind in report["kinds"]] == [("a", {"ok": 2})]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(gateway.seen) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--mix", "tiny:1"), "--mix: 'tiny' is no kind; allowed are short, long, more with --kind"),
        (("--mix", "short:0"), "--mix: 'short:0' is not NAME:NUMBER"),
        (("--mix", ""), "--mix: names no kind"),
        (("--kind", "tiny=5"), "--kind: 'tiny=5' is not NAME=TOKENS:ANSWER"),
        (("--kind", "tiny=5-3:1"), "--kind: 'tiny=5-3:1' needs a name"),
        (("--set", "prefill.cp=1"), "--config and --set: only for a cluster that --start starts"),
        (("--target", "here:1", "--start"), "--target: not together with --start"),
        (("--target", "127.0.0.1:1"), "127.0.0.1:1 does not answer"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "load", "--rate", "50", "--duration", "1", *arguments]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error

"""Sends a trace to a gateway, each request at its time whatever became of the others, and notes what each one met."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from ringserve.v1 import inference_pb2, inference_pb2_grpc
from services.offline.bench.load.trace import Arrival
from services.rpc.server import OPTIONS

CONTROL_SECONDS = 30.0
OK = "ok"


@dataclass(slots=True)
class Outcome:
    """What one request met. Seconds; `sent` and `ended` from the start of the run, `gaps` between tokens.

    `status` is "ok", or the gRPC status code's name in lower case.
    """

    arrival: Arrival
    sent: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    queue: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    status: str = ""

    @property
    def ttit(self) -> float:
        """The mean over this request's tokens after the first, 0 without any."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0


async def replay(
    target: str, trace: Sequence[Arrival], timeout: float, seed: int, tell: Callable[[str], None] = lambda status: None
) -> list[Outcome]:
    """The outcomes in the order of the trace; `tell` hears the status of each request that ends.

    `timeout` is each request's own deadline. Prompts are random tokens, and answers go on to their last token.
    Raises grpc.aio.AioRpcError where the gateway cannot even say what it serves.
    """
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        model = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=CONTROL_SECONDS)
        generator = np.random.default_rng(seed)
        requests = [_request(arrival, model, generator) for arrival in trace]
        outcomes = [Outcome(arrival) for arrival in trace]
        started = time.perf_counter()

        async def serve(outcome: Outcome, request: inference_pb2.GenerateRequest) -> None:
            await asyncio.sleep(outcome.arrival.at - (time.perf_counter() - started))
            await _serve(stub, outcome, request, timeout, started)
            tell(outcome.status)

        async with asyncio.TaskGroup() as group:
            for outcome, request in zip(outcomes, requests, strict=True):
                group.create_task(serve(outcome, request))
    return outcomes


def _request(
    arrival: Arrival, model: inference_pb2.GetModelInfoResponse, generator: np.random.Generator
) -> inference_pb2.GenerateRequest:
    ends = set(model.eos_token_ids)
    tokens = [token for token in range(min(model.vocab_size, 4096)) if token not in ends]
    return inference_pb2.GenerateRequest(
        tokenized=inference_pb2.TokenizedInput(input_ids=generator.choice(tokens, arrival.prompt_tokens).tolist()),
        sampling_params=inference_pb2.SamplingParams(max_tokens=arrival.max_tokens, ignore_eos=True),
    )


async def _serve(
    stub: inference_pb2_grpc.InferenceAsyncStub,
    outcome: Outcome,
    request: inference_pb2.GenerateRequest,
    timeout: float,
    started: float,
) -> None:
    outcome.sent = previous = time.perf_counter() - started
    try:
        async for response in stub.Generate(request, timeout=timeout):
            now = time.perf_counter() - started
            count = len(response.chunk.token_ids)
            if response.HasField("complete"):
                outcome.queue = response.complete.plan.queue_seconds
            if not count:
                continue
            if outcome.ttft is None:
                outcome.ttft, count = now - outcome.sent, count - 1
                outcome.num_tokens += 1
            # Tokens that came together each waited an equal share.
            outcome.gaps += [(now - previous) / count] * count if count else []
            outcome.num_tokens += count
            previous = now
        outcome.status = OK
    except grpc.aio.AioRpcError as failure:
        outcome.status = failure.code().name.lower()
    outcome.ended = time.perf_counter() - started

"""Request arrivals, drawn at random or read from a file, and their replay against a gateway.

`ringserve bench` calls it. The replay is open-loop: each request is sent at its time, whatever the state of the others.
Times in seconds from the start.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import grpc
import numpy as np

from ringserve.client.channel import CLIENT_OPTIONS
from ringserve.cp_core.errors import ConfigError
from ringserve.v1 import inference_pb2, inference_pb2_grpc


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestKind:
    """Request kind: prompts of `least_prompt` to `most_prompt` tokens, uniformly, and answers of `max_tokens`."""

    name: str
    least_prompt: int
    most_prompt: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Request of a trace.

    Each of the `block_ids`, if given, stands for `block_tokens` tokens, drawn with the id as the seed: prompts with the
    same first ids begin alike.
    """

    at: float
    kind: str
    prompt_tokens: int
    max_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


KINDS = (
    RequestKind(name="short", least_prompt=64, most_prompt=192, max_tokens=32),
    RequestKind(name="long", least_prompt=16384, most_prompt=16384, max_tokens=16),
)


def draw_trace(
    *,
    kinds: Mapping[str, RequestKind],
    rate: float,
    duration: float,
    mix: Mapping[str, float],
    every: Mapping[str, float],
    seed: int,
) -> list[Arrival]:
    """Draw Poisson arrivals of `rate` a second with kinds by the weights of `mix`, plus kinds at fixed intervals.

    Each kind in `every` arrives at its interval, first after half of it. A seed fixes the trace, and the random
    arrivals do not depend on `every`.
    """
    generator = np.random.default_rng(seed)
    names = list(mix)
    weights = np.array([mix[name] for name in names], dtype=float)
    arrivals = []
    at = 0.0
    while rate > 0:
        at += generator.exponential(1.0 / rate)
        if at >= duration:
            break
        name = names[int(generator.choice(len(names), p=weights / weights.sum()))]
        arrivals.append(_arrival(kinds[name], at, generator))
    for name, interval in every.items():
        times = np.arange(interval / 2, duration, interval)
        arrivals += [_arrival(kinds[name], float(time), generator) for time in times]
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(kind: RequestKind, at: float, generator: np.random.Generator) -> Arrival:
    prompt = int(generator.integers(kind.least_prompt, kind.most_prompt, endpoint=True))
    return Arrival(at=at, kind=kind.name, prompt_tokens=prompt, max_tokens=kind.max_tokens)


def write_trace(path: Path, trace: Sequence[Arrival]) -> None:
    """Write one JSON object a line. Raises ConfigError for the path."""
    try:
        path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in trace), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save-trace: {path} cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace. Raises ConfigError with the number of a bad line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from error
    trace = [_read_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not trace:
        raise ConfigError(f"--trace: {path} holds no arrivals")
    return sorted(trace, key=lambda arrival: arrival.at)


def _read_line(path: Path, number: int, line: str) -> Arrival:
    names = ", ".join(field.name for field in fields(Arrival))
    try:
        arrival = Arrival(**json.loads(line))
        arrival = replace(arrival, block_ids=tuple(arrival.block_ids))
        is_valid = arrival.at >= 0 and arrival.prompt_tokens >= 1 and arrival.max_tokens >= 1
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--trace: line {number} of {path} is no JSON object of {names}") from error
    if not is_valid or not isinstance(arrival.kind, str):
        raise ConfigError(
            f"--trace: line {number} of {path}: at must be 0 or more, "
            f"prompt_tokens and max_tokens 1 or more, kind a text"
        )
    return arrival


CONTROL_SECONDS = 30.0
OK = "ok"


@dataclass(slots=True)
class Outcome:
    """Request outcome, in seconds: `sent` and `ended` since the start of the run, `gaps` between tokens.

    `cached_tokens` of the prompt were not computed. `prefill` are the seconds of the prefill, predicted and measured.
    `status` is "ok", or the gRPC status code's name in lower case, of which `reason` is the service's sentence.
    """

    arrival: Arrival
    sent: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    queue: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    status: str = ""
    reason: str = ""
    cached_tokens: int = 0
    prefill: tuple[float, float] = (0.0, 0.0)
    prompt: Sequence[int] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def ttit(self) -> float:
        """Mean time between this request's tokens (`gaps`), 0 without any."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0


async def replay(
    target: str, trace: Sequence[Arrival], timeout: float, seed: int, tell: Callable[[str], None] = lambda status: None
) -> list[Outcome]:
    """Replay a trace and return the outcomes in its order; `tell` gets the status of each request that ends.

    `timeout` is the deadline of each request. Prompts are random tokens, and answers ignore end-of-sequence tokens.
    Raises grpc.aio.AioRpcError if the gateway does not answer GetModelInfo.
    """
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
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
    drawn = [np.random.default_rng(block).choice(tokens, arrival.block_tokens) for block in arrival.block_ids]
    # If the blocks have fewer tokens than the prompt, the rest is drawn at random; if they have more, it is cut.
    missing = max(0, arrival.prompt_tokens - len(drawn) * arrival.block_tokens)
    prompt = np.concatenate([*drawn, generator.choice(tokens, missing)])[: arrival.prompt_tokens]
    return inference_pb2.GenerateRequest(
        tokenized=inference_pb2.TokenizedInput(input_ids=prompt.tolist()),
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
                plan = response.complete.plan
                outcome.queue = plan.queue_seconds
                outcome.prefill = (plan.predicted_prefill_seconds, plan.prefill_seconds)
                outcome.cached_tokens = response.complete.usage.cached_tokens
                outcome.prompt = request.tokenized.input_ids
                outcome.token_ids = tuple(response.complete.output_ids)
            if not count:
                continue
            if outcome.ttft is None:
                outcome.ttft, count = now - outcome.sent, count - 1
                outcome.num_tokens += 1
            # Tokens of one message share its gap equally.
            outcome.gaps += [(now - previous) / count] * count if count else []
            outcome.num_tokens += count
            previous = now
        outcome.status = OK
    except grpc.aio.AioRpcError as failure:
        outcome.status, outcome.reason = failure.code().name.lower(), failure.details() or ""
    outcome.ended = time.perf_counter() - started

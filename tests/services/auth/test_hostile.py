"""Valid messages with hostile values: each is answered or refused with a sentence, and nothing of it stays."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import grpc
import httpx2
import pytest

from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.services.local_gateway import CALL_SECONDS, MODEL, LocalGateway
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

NUM_REQUESTS = 150
ALLOWED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
TEXTS = ["", "x", "é" * 50, "\x00", "\u202e", "a\nb", "'; --", "{{7*7}}", "%s%n", "../" * 20, "🦀" * 70, "<|end|>"]
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 99.0]
COUNTS = [0, 1, 2, 5, 8191, 8192, 2**31, 2**32 - 1]
IDS = ["", "c1", "c2", "c1/", "acme/c1", "\x7f", "ü", "z" * 256, "z" * 257]


def hostile(draw: random.Random) -> inference_pb2.GenerateRequest:
    """Return a request whose every field may be any value of its type."""
    mode: Any = draw.choice([0, 0, 0, 1, 2, 3, -1])
    request = inference_pb2.GenerateRequest(
        request_id=draw.choice(IDS), conversation_id=draw.choice(IDS), prompt_mode=mode
    )
    match draw.randrange(4):
        case 0:
            request.text = draw.choice(TEXTS)
        case 1:
            ids = [draw.choice([0, 1, 255, 256, 299]) for _ in range(draw.randrange(20))]
            request.tokenized.input_ids.extend([*ids, *([2**32 - 1] if draw.random() < 0.1 else [])])
        case 2:
            for _ in range(draw.randrange(4)):
                role = draw.choice(["user", "assistant", "system", "", "x"])
                request.chat.messages.add(role=role, content=draw.choice(TEXTS))
    params = request.sampling_params
    if draw.random() < 0.5:
        params.temperature = draw.choice(NUMBERS)
    params.max_tokens = draw.choice(COUNTS) if draw.random() < 0.3 else 2
    if draw.random() < 0.3:
        params.seed = draw.choice([0, 2**63, 2**64 - 1])
    if draw.random() < 0.3:
        params.stop_token_ids.extend(draw.choice([[0], [299, 299], [300], [2**32 - 1], list(range(257))]))
    params.ignore_eos = draw.random() < 0.5
    return request


async def read(call: Any) -> list[inference_pb2.GenerateResponse]:
    """Return the responses of a call, which may end in an error."""
    responses = []
    with suppress(grpc.aio.AioRpcError):
        async for response in call:
            responses.append(response)
    return responses


async def test_hostile_values_over_grpc_are_answered_or_refused_and_leave_nothing(gateway: LocalGateway) -> None:
    free, draw, answered = gateway.service.free_blocks(), random.Random(7), 0
    async with gateway.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for _ in range(NUM_REQUESTS):
            request = hostile(draw)
            # The test does not wait for requests that may have up to 8,190 tokens.
            deadline = 0.3 if request.sampling_params.max_tokens > 100 else CALL_SECONDS
            call = stub.Generate(request, timeout=deadline)
            responses = await read(call)
            code, details = await call.code(), await call.details()
            if code is grpc.StatusCode.OK:
                answered += 1
                assert responses[-1].HasField("complete"), request
            else:
                assert code in ALLOWED, f"{code} {details} for {request}"
                assert "\n" not in details
        await gateway.wait_idle()
        for name in IDS:
            forgotten = stub.DeleteConversation(
                inference_pb2.DeleteConversationRequest(conversation_id=name), timeout=WAIT_SECONDS
            )
            assert await forgotten.code() in {grpc.StatusCode.OK, *ALLOWED}
    assert NUM_REQUESTS > answered > NUM_REQUESTS / 10, "both kinds were drawn"
    assert gateway.service.free_blocks() == free


VALUES: list[Any] = [None, True, False, 0, -1, 1, 2**64, 1e308, "", "x", [], [[]], {}, [1], ["a"], {"a": 1}]
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "temperature", "seed", "stream", "stream_options", "n", "stop"),
    *("logprobs", "tools", "conversation_id", "request_id", "prompt_mode", "stop_token_ids", "user", "echo", "x"),
)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_hostile_values_over_http_are_answered_or_refused_and_leave_nothing(
    gateway: LocalGateway, path: str
) -> None:
    free, draw, answered = gateway.service.free_blocks(), random.Random(7), 0
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=CALL_SECONDS) as http:
        for _ in range(NUM_REQUESTS):
            body: dict[str, Any] = {"model": MODEL, "max_tokens": 2}
            body |= (
                {"prompt": random_tokens(5)}
                if path == "/v1/completions"
                else {"messages": [{"role": "user", "content": "x"}]}
            )
            for name in draw.sample(FIELDS, draw.randrange(4)):
                body[name] = draw.choice(VALUES)
            answer = await http.post(path, json=body)
            assert answer.status_code in (200, 400, 404, 409), f"{answer.text} for {body}"
            if answer.status_code == 200:
                answered += 1
            else:
                assert answer.json()["error"]["message"], body
        await gateway.wait_idle()
        for name in ("x", ""):
            await http.delete(f"/v1/conversations/{name}")
    assert NUM_REQUESTS > answered > NUM_REQUESTS / 10, "both kinds were drawn"
    assert gateway.service.free_blocks() == free

"""Generated requests against a whole service: each is answered or refused with a sentence, and nothing of it stays.

2,000 by default; `pytest tests/services/fuzz --fuzz-count 10000` sends more.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import pytest

from ringserve.services.rpc.errors import CODES
from ringserve.v1 import inference_pb2, inference_pb2_grpc
from tests.services.gateway.fuzz.messages import filled
from tests.services.local_gateway import LocalGateway
from tests.waiting import WAIT_SECONDS, eventually

NUM_CLIENTS = 16
HURRY_SECONDS = 0.3
"""Deadline of a turn that might have thousands of tokens, so that the test does not wait for them."""
FEW_TOKENS = 8
ALLOWED = {grpc.StatusCode.OK, *CODES.values()} - {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
VERBS: dict[str, Any] = {
    "Abort": inference_pb2.AbortRequest,
    "GetConversation": inference_pb2.GetConversationRequest,
    "ListConversations": inference_pb2.ListConversationsRequest,
    "ForkConversation": inference_pb2.ForkConversationRequest,
    "DeleteConversation": inference_pb2.DeleteConversationRequest,
    "GetModelInfo": inference_pb2.GetModelInfoRequest,
    "GetServerInfo": inference_pb2.GetServerInfoRequest,
}


def turn(draw: random.Random) -> inference_pb2.GenerateRequest:
    """Return a turn; some have few fields set, so that they are answered."""
    request: inference_pb2.GenerateRequest = filled(
        draw, inference_pb2.GenerateRequest(), draw.choice([0.05, 0.15, 0.5, 0.9])
    )
    if draw.random() < 0.5:
        del request.tokenized.input_ids[:]
        request.tokenized.input_ids.extend(draw.choices(range(300), k=draw.randrange(1, 12)))
    if draw.random() < 0.8:
        request.sampling_params.max_tokens = draw.choice([1, 2, 3])
    return request


async def send(stub: Any, draw: random.Random) -> tuple[str, grpc.StatusCode, str]:
    """One request to its end: the verb, the status and its details."""
    if draw.random() < 0.75:
        request, verb = turn(draw), "Generate"
        params = request.sampling_params
        is_long = params.max_tokens > FEW_TOKENS or not params.HasField("max_tokens")
        call = stub.Generate(request, timeout=HURRY_SECONDS if is_long else WAIT_SECONDS)
        if draw.random() < 0.05:
            call.cancel()
        try:
            async for _ in call:
                pass
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass
    else:
        verb = draw.choice(list(VERBS))
        call = getattr(stub, verb)(filled(draw, VERBS[verb](), 0.8), timeout=WAIT_SECONDS)
    code, details = await call.code(), await call.details() or ""
    return verb, code, details


async def forget_all(stub: Any) -> None:
    while True:
        page = await stub.ListConversations(inference_pb2.ListConversationsRequest(), timeout=WAIT_SECONDS)
        for each in page.conversations:
            request = inference_pb2.DeleteConversationRequest(conversation_id=each.conversation_id)
            await stub.DeleteConversation(request, timeout=WAIT_SECONDS)
        if not page.conversations:
            return


async def test_generated_requests_are_answered_or_refused_and_leave_nothing(
    gateway: LocalGateway, request: pytest.FixtureRequest
) -> None:
    count: int = request.config.getoption("--fuzz-count")
    free, seen = gateway.service.free_blocks(), Counter[tuple[str, str]]()
    async with gateway.channel() as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        await stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=WAIT_SECONDS)
        tasks = len(asyncio.all_tasks())

        async def client(number: int) -> None:
            draw = random.Random(number)
            for _ in range(count // NUM_CLIENTS):
                verb, code, details = await send(stub, draw)
                assert code in ALLOWED, f"{verb} met {code}: {details}"
                assert "\n" not in details, details
                assert "Traceback" not in details
                seen[verb, code.name] += 1

        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_CLIENTS):
                clients.create_task(client(number))
        await gateway.wait_idle(WAIT_SECONDS)
        await forget_all(stub)
        await eventually(
            lambda: len(asyncio.all_tasks()) <= tasks and gateway.service.free_blocks() == free, WAIT_SECONDS
        )
    assert seen["Generate", "OK"] > count / 50, seen
    assert seen["Generate", "INVALID_ARGUMENT"] > count / 50, seen
    assert {verb for verb, _ in seen} == {"Generate", *VERBS}

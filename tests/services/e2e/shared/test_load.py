"""Many turns at once: one decode batch, nothing mixed up, and nothing left behind by those that are cut short."""

from __future__ import annotations

import asyncio
import random
from contextlib import ExitStack, suppress

import grpc
import pytest

from ringserve.client import Client
from ringserve.cp_core.errors import NotFound
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2_grpc
from tests.services.e2e.cluster import Cluster, Inference, ids, scrape, wait_until
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

NUM_REQUESTS = 100
MAX_TOKENS = 10
LENGTHS = (5, 33, 120)


def test_turns_that_come_together_decode_in_one_batch_and_get_their_own_tokens(
    inference: Inference, stock: StockModel
) -> None:
    with ExitStack() as running:
        calls = [
            running.enter_context(inference.running(ids(random_tokens(30, seed=seed), max_tokens=4000)))
            for seed in range(3)
        ]
        assert len(calls) == 3
        wait_until(lambda: inference.ring("decode").num_requests_running == 3, "three turns are in one batch")
        prompt = random_tokens(50, seed=30)
        assert list(inference.answer(ids(prompt, max_tokens=8)).output_ids) == stock.greedy(prompt, 8).token_ids
        assert inference.ring("decode").num_requests_running == 3


@pytest.mark.parametrize("tokens", [5, 0])  # while it decodes; while it prefills
def test_a_client_that_hangs_up_ends_its_turn_and_frees_its_kv(
    cluster: Cluster, inference: Inference, tokens: int
) -> None:
    free, cancelled = inference.free_blocks(), "ringserve_requests_total{outcome=cancelled}"
    leaving = Inference(cluster.gateway)
    with leaving.running(ids(random_tokens(30 if tokens else 6000), max_tokens=2000), tokens):
        assert inference.free_blocks() != free
        before = scrape(cluster)[cancelled]
        leaving.channel.close()
        wait_until(lambda: inference.free_blocks() == free, "the KV is free again")
        wait_until(lambda: scrape(cluster)[cancelled] == before + 1, "the turn is cancelled, not answered")


class Storm:
    """Requests that all come at once. Every second one is cancelled: at a moment, or after a message, by chance."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, expected: dict[int, list[int]]) -> None:
        self._stub = stub
        self._expected = expected
        self._chance = random.Random(7)
        self.conversations: set[str] = set()
        self.answered = 0
        self.cancelled = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                group.create_task(self._one(number, self._chance.choice(LENGTHS), self._chance.uniform(0, 3)))

    async def _one(self, number: int, length: int, patience: float) -> None:
        conversation = f"storm-{number}" if number % 4 < 2 else ""
        is_hasty = number % 2 == 1
        request = ids(random_tokens(length, seed=length), max_tokens=MAX_TOKENS, conversation=conversation)
        call = self._stub.Generate(request, timeout=WAIT_SECONDS)
        is_early = number % 4 == 3  # however fast the machine is, these do not read their answers to the end
        timer = asyncio.get_running_loop().call_later(patience, call.cancel) if is_hasty and not is_early else None
        if conversation:
            self.conversations.add(conversation)
        try:
            tokens: list[int] = []
            async for response in call:
                tokens += response.chunk.token_ids
                if is_early:
                    call.cancel()
        except asyncio.CancelledError:
            assert is_hasty
            self.cancelled += 1
        else:
            assert tokens == self._expected[length], f"request {number}"
            self.answered += 1
            if timer is not None:
                timer.cancel()


def test_a_hundred_requests_half_of_them_cancelled_leave_the_kv_as_it_was(
    cluster: Cluster, inference: Inference, stock: StockModel
) -> None:
    free, before = inference.free_blocks(), inference.info().conversations
    expected = {length: stock.greedy(random_tokens(length, seed=length), MAX_TOKENS).token_ids for length in LENGTHS}

    async def storm() -> Storm:
        async with grpc.aio.insecure_channel(cluster.gateway) as channel:
            storm = Storm(inference_pb2_grpc.InferenceStub(channel), expected)
            await storm.run()
            return storm

    result = asyncio.run(storm())
    assert result.answered + result.cancelled == NUM_REQUESTS
    assert result.answered >= NUM_REQUESTS // 2
    assert result.cancelled >= NUM_REQUESTS // 4
    wait_until(inference.is_idle, "no turn is left")
    with Client(cluster.gateway) as client:
        for conversation in result.conversations:
            # Of those whose only turn was cancelled nothing is known, unless it was over by then.
            with suppress(NotFound):
                client.delete_conversation(conversation)
    assert inference.free_blocks() == free
    assert inference.info().conversations == before
    prompt = random_tokens(70, seed=31)
    assert list(inference.answer(ids(prompt)).output_ids) == stock.greedy(prompt, 6).token_ids

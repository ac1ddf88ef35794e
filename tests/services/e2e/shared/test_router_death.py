"""The router is killed, or stands still, while a stream runs: it is started again, and clients do not notice."""

from __future__ import annotations

import os
import signal
import time

import grpc

from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids, kill, pid_at, wait_until
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

NUM_TOKENS = 1200
"""Tokens of a stream, some seconds of them: it runs for most of the time in which the router is away."""


def is_back(cluster: Cluster, inference: Inference, old: int) -> bool:
    """Return whether another router knows both rings again."""
    try:
        info = inference.info()
        return pid_at(cluster.router) != old and [ring.state for ring in info.rings] == ["ready"] * 2
    except (grpc.RpcError, StopIteration):
        return False


def goes_on(inference: Inference, stock: StockModel, name: str, history: list[int]) -> None:
    """Check that a conversation has its history, and that its KV is where it was."""
    answer = inference.answer(ids([7, 8, 9], conversation=name, mode=inference_pb2.PROMPT_MODE_APPEND))
    assert list(answer.output_ids) == stock.greedy([*history, 7, 8, 9], 6).token_ids
    assert answer.usage.prompt_tokens == len(history) + 3
    assert answer.usage.cached_tokens == len(history) - 1
    inference.delete(name)


def test_a_killed_router_comes_back_and_neither_streams_nor_conversations_notice(
    cluster: Cluster, inference: Inference, stock: StockModel
) -> None:
    idle = random_tokens(90, seed=50)
    idle += inference.answer(ids(idle, conversation="idle")).output_ids
    old = pid_at(cluster.router)
    prompt = random_tokens(30, seed=51)
    request = ids(prompt, max_tokens=NUM_TOKENS, conversation="running")
    gaps, last, complete = [], None, None
    for response in inference.stream(request, seconds=2 * WAIT_SECONDS):
        now = time.monotonic()
        if last is not None:
            gaps.append(now - last)
        last = now
        if len(gaps) == 5:
            kill(old)
        if response.HasField("complete"):
            complete = response.complete
    assert complete is not None
    assert complete.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert len(complete.output_ids) == NUM_TOKENS
    assert list(complete.output_ids) == stock.follow(prompt, complete.output_ids).token_ids
    wait_until(lambda: is_back(cluster, inference, old), "the router is back")
    wait_until(inference.is_idle, "the turn is over for the new router, too")
    goes_on(inference, stock, "idle", idle)
    goes_on(inference, stock, "running", prompt + list(complete.output_ids))


def test_a_router_that_stands_still_is_killed_and_comes_back(
    cluster: Cluster, inference: Inference, stock: StockModel
) -> None:
    history = random_tokens(60, seed=52)
    history += inference.answer(ids(history, conversation="still")).output_ids
    old = pid_at(cluster.router)
    os.kill(old, signal.SIGSTOP)
    wait_until(lambda: is_back(cluster, inference, old), "the router is back")
    goes_on(inference, stock, "still", history)

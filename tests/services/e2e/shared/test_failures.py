"""Processes that are killed at the worst moment: a turn that loses a ring goes on, and its client sees no error."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from typing import Any

import grpc
import psutil
import pytest

from ringserve.client import RingInfo
from ringserve.mapping import enum_name
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids, kill, pid_at, wait_until
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

LONG = 600


def goes_on_unseen(
    inference: Inference,
    stock: StockModel,
    request: inference_pb2.GenerateRequest,
    role: str,
    tokens: int,
    hit: Callable[[], None],
) -> list[int]:
    """Hit a turn when its client has so many tokens. It loses the ring of `role`, and its answer is right.

    Return the answer's tokens.
    """
    max_tokens = request.sampling_params.max_tokens
    call = inference.stream(request, WAIT_SECONDS)
    try:
        seen: list[int] = []
        for response in call:
            seen += response.chunk.token_ids
            if response.chunk.completion_tokens >= tokens:
                break
        hit()
        for response in call:
            seen += response.chunk.token_ids
        assert len(seen) == max_tokens
        assert seen == stock.follow(request.tokenized.input_ids, seen).token_ids
        assert list(response.complete.output_ids) == seen
        (failover,) = response.complete.plan.failovers
        assert failover.after_tokens >= tokens
        assert enum_name(inference_pb2.Role, failover.role) == role
        return seen
    finally:
        call.cancel()


def ends_unavailable(call: Any) -> str:
    """Read a stream that must end as UNAVAILABLE, in one sentence."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
    details: str = error.details()
    assert "\n" not in details
    assert "Traceback" not in details
    return details


def wait_for_rebuild(inference: Inference, role: str, old: RingInfo, *, lost: Collection[int]) -> RingInfo:
    """Return the ring's status when it serves again, with new ranks in place of `lost` ones alone."""

    def is_new() -> bool:
        ring = inference.ring(role)
        return ring.state == "ready" and ring.incarnation != old.incarnation

    wait_until(is_new, f"the {role} ring is rebuilt")
    new = inference.ring(role)
    pids = list(zip(new.rank_pids, old.rank_pids, strict=True))
    made = {number for number, (now, before) in enumerate(pids) if now != before}
    assert made == set(lost)
    return new


def begin_conversation(inference: Inference, name: str) -> list[int]:
    """Its history after one turn."""
    prompt = random_tokens(90, seed=40)
    return prompt + list(inference.answer(ids(prompt, conversation=name)).output_ids)


def goes_on(inference: Inference, stock: StockModel, name: str, history: list[int]) -> inference_pb2.GenerateComplete:
    """Check that the conversation's next turn gives the right tokens, whatever KV was lost."""
    answer = inference.answer(ids([7, 8, 9], conversation=name, mode=inference_pb2.PROMPT_MODE_APPEND))
    assert list(answer.output_ids) == stock.greedy([*history, 7, 8, 9], 6).token_ids
    inference.delete(name)
    return answer


def test_a_prefill_rank_killed_while_a_turn_prefills_is_not_seen_by_its_client(
    inference: Inference, stock: StockModel
) -> None:
    history = begin_conversation(inference, "prefill-rank")
    old = inference.ring("prefill")
    request = ids(random_tokens(7000), max_tokens=5)
    goes_on_unseen(inference, stock, request, "prefill", 0, lambda: kill(old.rank_pids[1]))
    new = wait_for_rebuild(inference, "prefill", old, lost=[1])
    assert new.rebuilds == old.rebuilds + 1
    # All KV that the decode ring retained comes back from there.
    answer = goes_on(inference, stock, "prefill-rank", history)
    assert [(part.source, part.start, part.stop) for part in answer.plan.cached_sources] == [
        ("pulled_from_decode", 0, len(history) - 1)
    ]


def test_a_decode_rank_killed_in_mid_answer_is_not_seen_by_its_client(inference: Inference, stock: StockModel) -> None:
    history = begin_conversation(inference, "decode-rank")
    old = inference.ring("decode")
    request = ids(random_tokens(30), max_tokens=LONG)
    goes_on_unseen(inference, stock, request, "decode", 5, lambda: kill(old.rank_pids[1]))
    new = wait_for_rebuild(inference, "decode", old, lost=[1])
    assert new.rebuilds == old.rebuilds + 1
    answer = goes_on(inference, stock, "decode-rank", history)
    # The prompt's KV is still on the prefill ring; what the decode ring had made is computed again.
    assert [(part.source, part.start, part.stop) for part in answer.plan.cached_sources] == [("kept_on_prefill", 0, 90)]


def freeze(pid: int) -> None:
    """Stop a process, which then neither answers nor ends."""
    os.kill(pid, signal.SIGSTOP)


def test_a_frozen_decode_rank_is_noticed_and_replaced(inference: Inference, stock: StockModel) -> None:
    history = begin_conversation(inference, "frozen-rank")
    old = inference.ring("decode")
    request = ids(random_tokens(30), max_tokens=LONG)
    goes_on_unseen(inference, stock, request, "decode", 5, lambda: freeze(old.rank_pids[1]))
    assert wait_for_rebuild(inference, "decode", old, lost=[1]).rebuilds == old.rebuilds + 1
    wait_until(lambda: not psutil.pid_exists(old.rank_pids[1]), "the frozen rank is killed")
    goes_on(inference, stock, "frozen-rank", history)


def test_a_frozen_decode_leader_is_noticed_killed_and_replaced(inference: Inference, stock: StockModel) -> None:
    history = begin_conversation(inference, "frozen-leader")
    old = inference.ring("decode")
    leader = pid_at(old.endpoint)
    request = ids(random_tokens(30), max_tokens=LONG)
    goes_on_unseen(inference, stock, request, "decode", 5, lambda: freeze(leader))
    wait_for_rebuild(inference, "decode", old, lost=[])
    wait_until(lambda: not psutil.pid_exists(leader), "the frozen leader is killed")
    wait_until(inference.is_idle, "the turn is over for the router, too")
    goes_on(inference, stock, "frozen-leader", history)


@pytest.mark.parametrize(("role", "tokens"), [("prefill", 0), ("decode", 5)])
def test_a_killed_leader_is_started_again_and_takes_its_ranks_over(
    inference: Inference, stock: StockModel, role: str, tokens: int
) -> None:
    name, hit = f"{role}-leader", f"{role}-hit"
    history = begin_conversation(inference, name)
    old = inference.ring(role)
    leader = pid_at(old.endpoint)  # found before the turn runs: on a busy machine the search takes seconds
    prompt, max_tokens = (random_tokens(30), LONG) if tokens else (random_tokens(7000), 5)
    request = ids(prompt, max_tokens=max_tokens, conversation=hit, request_id=hit)
    answer = goes_on_unseen(inference, stock, request, role, tokens, lambda: kill(leader))
    wait_for_rebuild(inference, role, old, lost=[])
    wait_until(inference.is_idle, "the turn is over for the router, too")
    goes_on(inference, stock, name, history)
    # The turn that was hit has left its conversation, and its name is free again.
    goes_on(inference, stock, hit, prompt + answer)
    assert inference.answer(ids([1, 2], request_id=hit)).finish_reason == inference_pb2.FINISH_REASON_LENGTH


def test_a_killed_gateway_comes_back_at_its_address_and_knows_the_conversations(
    cluster: Cluster, inference: Inference, stock: StockModel
) -> None:
    history = begin_conversation(inference, "gateway")
    free = inference.free_blocks()
    old = pid_at(cluster.gateway)
    with inference.running(ids(random_tokens(30), max_tokens=LONG), tokens=5) as call:
        kill(old)
        ends_unavailable(call)

    def answers() -> bool:
        try:
            return inference.is_idle()
        except grpc.RpcError:
            return False

    wait_until(answers, "the gateway is back and the turn it served is over")
    assert inference.free_blocks() == free
    goes_on(inference, stock, "gateway", history)

"""Processes that are killed at the worst moment: the turn says so at once, the next one is right."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from ringserve.v1 import inference_pb2
from services.offline.reference import StockModel
from tests.services.e2e.cluster import Cluster, Inference, ids, kill, pid_at, wait_until
from tests.workers.models import random_tokens

LONG = 4000
REBUILD_SECONDS = 90.0
"""A rebuild takes some 6 s, on a machine with nothing else to do."""
NOTICE_SECONDS = 5.0
"""A turn that was hit must say so by then."""


def ends_unavailable(call: Any) -> str:
    """Read a stream that must end as UNAVAILABLE, soon and in one sentence."""
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
    assert time.monotonic() - began < NOTICE_SECONDS
    details: str = error.details()
    assert "\n" not in details
    assert "Traceback" not in details
    return details


def wait_for_rebuild(inference: Inference, role: str, old: inference_pb2.RingInfo) -> inference_pb2.RingInfo:
    """Return the ring's status when it serves again, with new ranks."""

    def is_new() -> bool:
        ring = inference.ring(role)
        return ring.state == "ready" and ring.incarnation != old.incarnation

    wait_until(is_new, f"the {role} ring is rebuilt", REBUILD_SECONDS)
    new = inference.ring(role)
    assert not set(new.rank_pids) & set(old.rank_pids)
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


def test_a_prefill_rank_killed_while_a_turn_prefills_fails_that_turn_and_no_other(
    inference: Inference, stock: StockModel
) -> None:
    history = begin_conversation(inference, "prefill-rank")
    old = inference.ring("prefill")
    with inference.running(ids(random_tokens(7000), max_tokens=5), tokens=0) as call:
        kill(old.rank_pids[1])
        said = ends_unavailable(call)
    assert "prefill-0" in said
    new = wait_for_rebuild(inference, "prefill", old)
    assert new.rebuilds == old.rebuilds + 1
    # All KV that the decode ring retained comes back from there.
    answer = goes_on(inference, stock, "prefill-rank", history)
    assert [(part.source, part.start, part.stop) for part in answer.plan.cached_sources] == [
        ("pulled_from_decode", 0, len(history) - 1)
    ]


def test_a_decode_rank_killed_in_mid_answer_fails_that_turn_and_its_conversations_go_on(
    inference: Inference, stock: StockModel
) -> None:
    history = begin_conversation(inference, "decode-rank")
    old = inference.ring("decode")
    with inference.running(ids(random_tokens(30), max_tokens=LONG), tokens=5) as call:
        kill(old.rank_pids[1])
        said = ends_unavailable(call)
    assert "decode-0" in said
    new = wait_for_rebuild(inference, "decode", old)
    assert new.rebuilds == old.rebuilds + 1
    answer = goes_on(inference, stock, "decode-rank", history)
    # The prompt's KV is still on the prefill ring; what the decode ring had made is computed again.
    assert [(part.source, part.start, part.stop) for part in answer.plan.cached_sources] == [("kept_on_prefill", 0, 90)]


@pytest.mark.parametrize(("role", "tokens"), [("prefill", 0), ("decode", 5)])
def test_a_killed_leader_is_started_again_with_a_ring_of_its_own(
    inference: Inference, stock: StockModel, role: str, tokens: int
) -> None:
    name = f"{role}-leader"
    history = begin_conversation(inference, name)
    old = inference.ring(role)
    leader = pid_at(old.endpoint)  # found before the turn runs: on a busy machine the search takes seconds
    prompt, max_tokens = (random_tokens(30), LONG) if tokens else (random_tokens(7000), 5)
    request = ids(prompt, max_tokens=max_tokens, conversation="hit", request_id="hit")
    with inference.running(request, tokens) as call:
        kill(leader)
        assert role in ends_unavailable(call)
    wait_for_rebuild(inference, role, old)
    wait_until(inference.is_idle, "the turn is over for the router, too")
    goes_on(inference, stock, name, history)
    # The name of the turn and of its conversation are free again.
    assert inference.answer(ids([1, 2], conversation="hit", request_id="hit")).finish_reason == "length"
    inference.delete("hit")


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

    wait_until(answers, "the gateway is back and the turn it served is over", REBUILD_SECONDS)
    assert inference.free_blocks() == free
    goes_on(inference, stock, "gateway", history)

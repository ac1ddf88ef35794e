"""Conversations by gRPC, HTTP and commands: forked, listed, waited for, forgotten."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from ringserve.client import Client
from ringserve.cp_core.errors import Busy, InvalidRequest, NotFound
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Cluster, Inference, ids, wait_until
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.gateway) as client:
        yield client


def go_on(inference: Inference, name: str, new: list[int], **fields: object) -> inference_pb2.GenerateComplete:
    request = ids(new, max_tokens=6, conversation=name)
    request.prompt_mode = inference_pb2.PROMPT_MODE_APPEND
    for field, value in fields.items():
        setattr(request, field, value)
    return inference.answer(request)


def test_two_forks_of_one_history_go_on_each_in_its_own_way(
    inference: Inference, client: Client, stock: StockModel
) -> None:
    free = inference.free_blocks()
    prompt = random_tokens(77, seed=40)
    history = [*prompt, *inference.answer(ids(prompt, max_tokens=6, conversation="tale")).output_ids]
    whole, part = client.fork_conversation("tale", "tale-2"), client.fork_conversation("tale", "tale-3", 50)
    assert (whole.num_tokens, part.num_tokens) == (len(history), 50)
    assert {place.role: place.num_tokens for place in part.placements} == {"prefill": 50, "decode": 50}
    client.delete_conversation("tale")
    for name, known in (("tale-2", history), ("tale-3", history[:50])):
        answer = go_on(inference, name, [7, 8])
        assert list(answer.output_ids) == stock.greedy([*known, 7, 8], 6).token_ids
        assert answer.usage.cached_tokens == (len(known) - 1 if name == "tale-2" else 50)
    with pytest.raises(InvalidRequest, match="new_id: conversation 'tale-2' exists already"):
        client.fork_conversation("tale-3", "tale-2")
    with pytest.raises(InvalidRequest, match="new_id: '' is not allowed"):
        client.fork_conversation("tale-3", "")
    for name in ("tale-2", "tale-3"):
        client.delete_conversation(name)
    assert inference.free_blocks() == free


def test_a_list_goes_on_page_by_page(inference: Inference, client: Client) -> None:
    inference.answer(ids(random_tokens(20), max_tokens=6, conversation="page-0"))
    for number in range(1, 5):
        client.fork_conversation("page-0", f"page-{number}", number)
    found = list(client.list_conversations("page-", page_size=2))
    assert [(item.conversation_id, item.num_tokens) for item in found] == [
        ("page-0", 26),
        *((f"page-{number}", number) for number in range(1, 5)),
    ]
    assert (found[0].kept_on_prefill, found[0].kept_on_decode, found[4].kept_on_prefill) == (20, 25, 4)
    for item in found:
        client.delete_conversation(item.conversation_id)
    assert list(client.list_conversations("page-")) == []


def test_a_second_turn_is_refused_by_the_name_of_the_first_or_waits_for_it(
    inference: Inference, client: Client, stock: StockModel
) -> None:
    prompt = random_tokens(30, seed=41)
    history = [*prompt, *inference.answer(ids(prompt, max_tokens=6, conversation="line")).output_ids]
    running = ids([1], max_tokens=4000, conversation="line")
    running.request_id = "the-first"
    with ThreadPoolExecutor(1) as pool:
        with inference.running(running) as call:
            with pytest.raises(grpc.RpcError) as caught:
                go_on(inference, "line", [2])
            error: Any = caught.value  # also a grpc.Call, which its type does not say
            assert error.code() is grpc.StatusCode.ABORTED
            assert "'the-first'" in error.details()
            waiting = pool.submit(go_on, inference, "line", [2], wait=True)
            wait_until(lambda: inference.conversation("line").num_waiting == 1, "one turn waits")
            call.cancel()
        assert list(waiting.result(WAIT_SECONDS).output_ids) == stock.greedy([*history, 2], 6).token_ids
    client.delete_conversation("line")


def test_a_conversation_is_forgotten_after_its_time_to_live(inference: Inference, client: Client) -> None:
    free = inference.free_blocks()
    request = ids(random_tokens(40), max_tokens=6, conversation="brief")
    request.conversation_ttl_seconds = 0.5
    asked = time.monotonic()
    inference.answer(request)
    wait_until(lambda: inference.free_blocks() == free, "its KV is free")
    assert time.monotonic() - asked > 0.5
    with pytest.raises(NotFound, match="'brief'"):
        client.conversation("brief")


def test_the_command_shows_forks_and_deletes(cluster: Cluster, inference: Inference, client: Client) -> None:
    inference.answer(ids(random_tokens(40), max_tokens=6, conversation="cli"))
    target = ("--target", cluster.gateway)
    run = cluster.ringserve.run
    forked = run("conversations", "fork", "cli", "cli-2", "--at-token", "10", "--json", *target)
    assert (forked.returncode, forked.stderr) == (0, "")
    assert json.loads(forked.stdout)["num_tokens"] == 10
    listed = run("conversations", "list", "--prefix", "cli", *target)
    assert "cli-2" in listed.stdout
    assert "40/45" in listed.stdout
    shown = run("conversations", "show", "cli", *target)
    # Which rank computes how much depends on the measured rates.
    kept = r"40 on prefill-0 \((\d+)\+(\d+)\), 45 on decode-0 \((\d+)\+(\d+)\)"
    match = re.fullmatch(rf"cli: 46 tokens, 1 turns; KV retained \(changes of its places: 1\): {kept}\n", shown.stdout)
    assert match is not None, shown.stdout
    held = [int(number) for number in match.groups()]
    assert (sum(held[:2]), sum(held[2:])) == (40, 45)
    for name in ("cli", "cli-2"):
        assert run("conversations", "delete", name, *target).returncode == 0
    gone = run("conversations", "delete", "cli", *target)
    assert (gone.returncode, gone.stderr) == (1, "ringserve: conversation_id: there is no conversation 'cli'\n")
    with pytest.raises((NotFound, Busy)):
        client.conversation("cli")

"""Service with one ring of each role, secured, of different shapes and with little room.

While a ring restarts, turns wait for it.
"""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ringserve.client.retries import NO_RETRIES
from ringserve.services.offline.reference import StockModel
from ringserve.v1 import inference_pb2
from tests.services.e2e.cluster import Ringserve, ids, pid_at, wait_until
from tests.services.e2e.own.conftest import OPERATOR, Secure
from tests.services.e2e.talking import under_load
from tests.waiting import WAIT_SECONDS
from tests.workers.models import random_tokens

NUM_TOKENS = 200
CROWDED_PROMPT, CROWDED_TOKENS = 90, 420


def test_two_turns_from_cp1_tp2_to_cp2_tp1_and_back(secure: Secure, stock: StockModel) -> None:
    inference = secure.inference()
    prefill, decode = inference.ring("prefill"), inference.ring("decode")
    assert (prefill.num_ranks, prefill.tp, len(set(prefill.rank_pids))) == (1, 2, 2)
    assert (decode.num_ranks, decode.tp, len(set(decode.rank_pids))) == (2, 1, 2)
    history: list[int] = []
    for turn, size in enumerate((150, 20)):
        history += random_tokens(size, seed=turn)
        complete = inference.answer(
            ids(history, max_tokens=7, conversation="c", mode=inference_pb2.PROMPT_MODE_WHOLE_HISTORY)
        )
        assert list(complete.output_ids) == stock.greedy(history, 7).token_ids, f"turn {turn}"
        history += complete.output_ids
    # Six of the first answer's seven tokens have KV, which only the decode ring had: K and V of 2 layers, 2 heads.
    assert complete.plan.pulled_bytes == 6 * 2 * 2 * 2 * 16 * 4
    inference.delete("c")


def test_turns_that_gave_way_answer_as_on_one_process_and_are_counted(secure: Secure, stock: StockModel) -> None:
    """Four turns come to 2040 tokens, and the ring has room for 1024.

    All are on their way before one is read: how fast this process reads has no say in how many decode at a time.
    """
    inference = secure.inference()
    prompts = [random_tokens(CROWDED_PROMPT, seed=seed) for seed in range(4)]
    calls = [inference.stream(ids(prompt, max_tokens=CROWDED_TOKENS)) for prompt in prompts]
    answers = [list(call)[-1].complete for call in calls]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.output_ids) == CROWDED_TOKENS
        assert list(answer.output_ids) == stock.follow(prompt, answer.output_ids).token_ids
    wait_until(lambda: inference.ring("decode").num_preemptions > 0, "the ring's status tells of a turn that gave way")
    wait_until(inference.is_idle, "the cluster is idle")


def test_both_rings_restart_and_turns_wait_instead_of_failing(
    ringserve: Ringserve, secure: Secure, stock: StockModel, tmp_path: Path
) -> None:
    inference = secure.inference()
    before = {ring.name: ring for ring in inference.info().rings}
    most_waiting, is_shown_away = 0, False

    def restart_both() -> None:
        command = ("restart", "prefill-0", "decode-0", "--name", secure.cluster.name, "--json")
        restarting = ringserve.start(*command, "--config", str(secure.config), output=tmp_path / "restart.log")

        def is_over() -> bool:
            nonlocal most_waiting, is_shown_away
            info = inference.info()
            most_waiting = max(most_waiting, info.turns_waiting_for_rings)
            is_shown_away |= any(ring.state == "away" and ring.restarting for ring in info.rings)
            return restarting.poll() is not None

        wait_until(is_over, "both rings have restarted")
        assert restarting.returncode == 0, (tmp_path / "restart.log").read_text()
        told = (tmp_path / "restart.log").read_text().splitlines()[-1]
        assert json.loads(told) == {"rings": ["prefill-0", "decode-0"], "serves": True}

    under_load(partial(secure.client, OPERATOR, NO_RETRIES), 2, restart_both, stock)
    assert most_waiting > 0, "turns were there while a ring was away"
    assert is_shown_away
    after = {ring.name: ring for ring in inference.info().rings}
    assert set(after) == {"prefill-0", "decode-0"}
    for name, ring in after.items():
        assert ring.incarnation != before[name].incarnation
        assert not ring.restarting


def test_the_clusters_own_gateway_comes_back_at_its_place_when_its_turns_have_ended(secure: Secure) -> None:
    inference = secure.inference()
    before = pid_at(secure.cluster.gateway)
    with inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call:
        os.kill(before, signal.SIGTERM)
        *_, last = call
        assert last.complete.usage.completion_tokens == NUM_TOKENS
    again = secure.inference()
    request = ids(random_tokens(9), max_tokens=4)
    (*_, complete) = again.stub.Generate(request, timeout=WAIT_SECONDS, wait_for_ready=True)
    assert len(complete.complete.output_ids) == 4
    assert pid_at(secure.cluster.gateway) != before


def test_a_cluster_that_is_told_to_end_lets_its_turns_end_first(ringserve: Ringserve, secure: Secure) -> None:
    """Last: it ends the cluster."""
    inference = secure.inference()
    with inference.running(ids(random_tokens(9), max_tokens=NUM_TOKENS)) as call, ThreadPoolExecutor(1) as thread:
        responses = thread.submit(list, call)
        down = ringserve.run("down", "--name", secure.cluster.name)
        assert down.returncode == 0, down.stderr
        assert responses.result(WAIT_SECONDS)[-1].complete.usage.completion_tokens == NUM_TOKENS

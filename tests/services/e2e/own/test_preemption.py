"""A decode ring that is too small for its turns, over Ray and gRPC."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.reference import StockModel
from tests.services.e2e.cluster import Inference, Ringserve, ids, running_cluster, wait_until
from tests.workers.models import random_tokens

MAX_TOKENS = 150
LENGTHS = (40, 33, 21)


def test_turns_that_gave_way_answer_as_on_one_process_and_are_counted(
    ringserve: Ringserve, model_path: Path, stock: StockModel
) -> None:
    """256 tokens of KV for three turns of about 180."""
    settings = ("kv_cache.tokens_per_rank=128", "kv_cache.block_tokens=4", "decode.headroom_tokens=16")
    options = [word for setting in settings for word in ("--set", setting)]
    with running_cluster(ringserve, "crowded", model_path, *options) as cluster:
        inference = Inference(cluster.gateway)
        prompts = [random_tokens(length, seed=length) for length in LENGTHS]
        requests = [ids(prompt, max_tokens=MAX_TOKENS) for prompt in prompts]
        with ThreadPoolExecutor(len(requests)) as threads:
            answers = list(threads.map(inference.answer, requests))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.output_ids) == stock.greedy(prompt, MAX_TOKENS).token_ids
        assert inference.ring("decode").num_preemptions > 0
        wait_until(inference.is_idle, "the cluster is idle")
        inference.channel.close()

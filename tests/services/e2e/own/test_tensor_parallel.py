"""A whole service whose prefill ranks share the heads and whose decode ranks share the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.reference import StockModel
from tests.services.e2e.cluster import Inference, Ringserve, ids, running_cluster
from tests.workers.models import random_tokens

pytestmark = pytest.mark.timeout(240)

SHAPE = ("prefill.cp=1", "prefill.tp=2", "decode.cp=2", "decode.tp=1")


def test_two_turns_from_cp1_tp2_to_cp2_tp1_and_back(ringserve: Ringserve, model_path: Path, stock: StockModel) -> None:
    options = [word for setting in SHAPE for word in ("--set", setting)]
    with running_cluster(ringserve, "tensor-parallel", model_path, *options) as cluster:
        inference = Inference(cluster.gateway)
        prefill, decode = inference.ring("prefill"), inference.ring("decode")
        assert (prefill.num_ranks, prefill.tp, len(set(prefill.rank_pids))) == (1, 2, 2)
        assert (decode.num_ranks, decode.tp, len(set(decode.rank_pids))) == (2, 1, 2)
        history: list[int] = []
        for turn, size in enumerate((150, 20)):
            history += random_tokens(size, seed=turn)
            complete = inference.answer(ids(history, max_tokens=7, conversation="c"))
            assert list(complete.output_ids) == stock.greedy(history, 7).token_ids, f"turn {turn}"
            history += complete.output_ids
        # Six of the first answer's seven tokens have KV, which only the decode ring had: K and V of 2 layers, 2 heads.
        assert complete.plan.pulled_bytes == 6 * 2 * 2 * 2 * 16 * 4
        inference.channel.close()

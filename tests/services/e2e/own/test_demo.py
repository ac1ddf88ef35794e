"""`ringserve demo`, small: it proves itself."""

from __future__ import annotations

import json

from cp_core.cost.model import PREFILL_ALGORITHMS
from tests.services.e2e.cluster import START_SECONDS, Ringserve

SMALL = ("demo", "--model", "builtin:tiny", "--tokens", "1024", "--max-tokens", "8")


def test_the_demo_passes_its_own_check_and_prints_one_object(ringserve: Ringserve) -> None:
    finished = ringserve.run_process(*SMALL, "--json", seconds=START_SECONDS)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["passed"]
    assert report["equal_to_transformers"] == [True, True, True]
    assert report["right"] == [None, None, None], "the model is random"
    first, second, fork = report["turns"]
    assert first["plan"]["cached_tokens"] == 0
    assert first["usage"]["prompt_tokens"] >= 1024
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 7
    assert fork["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]
    for turn in report["turns"]:
        for shares in turn["tokens_per_rank"].values():
            assert max(shares) - min(shares) <= 16
    predicted = {each["algorithm"]: each["predicted_prefill_seconds"] for each in second["plan"]["alternatives"]}
    chosen = predicted[second["plan"]["algorithm"]]
    assert chosen <= 1.02 * min(predicted[name] for name in PREFILL_ALGORITHMS), "a tie, or the fastest"
    assert "Traceback" not in finished.stderr

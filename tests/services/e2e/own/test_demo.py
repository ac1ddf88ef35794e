"""`ringserve demo`, small: it proves itself, and cleans up whether it ends or is ended."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.services.e2e.cluster import START_SECONDS, Ringserve, wait_until
from tests.services.e2e.terminal import started

EXIT_INTERRUPTED = 130
SMALL = ("demo", "--tokens", "1024", "--max-tokens", "8")


def test_the_demo_passes_its_own_check_and_prints_one_object(ringserve: Ringserve) -> None:
    finished = ringserve.run(*SMALL, "--json", seconds=START_SECONDS)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout)
    assert report["passed"]
    assert report["equal_to_transformers"] == [True, True]
    first, second = report["turns"]
    assert first["plan"]["cached_tokens"] == 0
    assert first["usage"]["prompt_tokens"] >= 1024
    assert second["usage"]["cached_tokens"] == first["usage"]["prompt_tokens"] + 7
    for turn in report["turns"]:
        for shares in turn["tokens_per_rank"].values():
            assert max(shares) - min(shares) <= 16
    predicted = {each["algorithm"]: each["predicted_prefill_seconds"] for each in second["plan"]["alternatives"]}
    chosen = predicted[second["plan"]["algorithm"]]
    assert chosen <= 1.02 * min(predicted["pass_kv"], predicted["pass_q"]), "a tie, or the faster one"
    assert "Traceback" not in finished.stderr


SERVES = r"gateway serves at \S+\s+\S+"


def test_ctrl_c_ends_the_demo_while_it_answers_and_leaves_nothing(ringserve: Ringserve, tmp_path: Path) -> None:
    # An answer of 5000 tokens takes a minute; the demo is ended before.
    long = ("demo", "--tokens", "600", "--max-tokens", "5000")
    with started(ringserve, tmp_path, *long) as demo:
        wait_until(
            lambda: bool(re.search(SERVES, demo.output)) or demo.is_over,
            "the demo has started",
            START_SECONDS,
        )
        assert not demo.is_over, demo.output
        assert demo.interrupt() == EXIT_INTERRUPTED, demo.output
        demo.check_nothing_is_left()

"""Figures of drafts: workloads, rows and targets, without a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.__main__ import main
from bench.service.drafts import DOCUMENT, EDIT, FREE, MOST_RATIO, Form, batches_of, measure, prompts, targets_of
from ringserve.client.results import Answer, Usage


class Fake:
    """Service whose drafts halve the time, and change one answer of the last round."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def ask(self, texts: Sequence[str], max_drafts: int | None) -> list[Answer]:
        self.asked.append(max_drafts)
        usage = Usage(completion_tokens=31, accepted_draft_tokens=0 if max_drafts == 0 else 20)
        seconds = 0.04 if max_drafts == 0 else 0.02
        tokens = (1, 2) if len(self.asked) < 5 else (1, 3)
        return [Answer(ttit_seconds=seconds, usage=usage, token_ids=tokens) for _ in texts]


def test_a_row_compares_rounds_with_and_without_drafts() -> None:
    fake: Any = Fake()
    row = measure(fake, Form(2, "helix"), EDIT, [["a", "b"]], 2)
    assert fake.asked == [0, 0, None, 0, None]
    assert row.value("drafts_ratio") == pytest.approx(0.5)
    assert row.value("accepted") == pytest.approx(2.0)
    assert row.figures["same"] == "2 of 4"
    found = {target.text: target.verdict for target in targets_of([row])}
    assert found == {
        "edit, 2 x helix, batch 2: over without drafts": "MISSED",
        "edit, 2 x helix, batch 2: accepted a step": "MISSED",
    }
    free = measure(fake, Form(1, "gather"), FREE, [["a"], ["b"]], 1)
    assert [target.verdict for target in targets_of([free])] == ["met"]


def test_prompts_of_a_batch_differ_and_come_again_in_larger_ones() -> None:
    assert all(len({*prompts(workload, "The log.")}) >= 4 for workload in MOST_RATIO)
    assert all("The log." in each for each in prompts(DOCUMENT, "The log."))
    assert batches_of("abcd", 1) == [["a"], ["b"], ["c"], ["d"]]
    assert batches_of("abcde", 2) == [["a", "b"], ["c", "d"], ["e"]]
    assert batches_of("abc", 4) == [["a", "b", "c", "a"]]


@pytest.mark.parametrize("options", [["--forms", "2:ring"], ["--batches", "0"], ["--rounds", "0"]])
def test_wrong_options_are_refused_before_a_cluster_starts(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafts", *options]) == 1
    assert "is not allowed; give" in capsys.readouterr().err

"""Turns of the served benchmarks: what is timed, and what transformers computes."""

from typing import Any

import numpy as np
import pytest
import torch

from bench.rings.ring_processes import RankPlace
from bench.service import served
from bench.service.served import DrawnTurns, StockTurns, Turn, TurnTimes
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.services.offline.reference import Reference, StockModel
from ringserve.workers.model.builtin import resolve_model_path


def test_ttit_leaves_out_the_gap_in_which_the_kv_is_handed_over() -> None:
    times = TurnTimes(tokens=(1.0, 1.9, 2.0, 2.1, 2.2))
    assert times.ttft == 1.0
    assert times.ttit == pytest.approx(0.1)


def test_both_contenders_draw_the_same_turns_and_a_new_prompt_each_time() -> None:
    ours, theirs = (DrawnTurns(1000, "c") for _ in range(2))
    first, same = (each.turn(8, 2, is_new=True) for each in (ours, theirs))
    assert first.name == same.name
    assert first.token_ids.tolist() == same.token_ids.tolist()
    second = ours.turn(8, 2, is_new=True)
    assert second.name != first.name
    assert second.token_ids.tolist() != first.token_ids.tolist()
    grown = DrawnTurns(1000, "c")
    assert [grown.turn(8, 2, is_new=False).is_first for _ in range(3)] == [True, False, False]


def test_transformers_continues_a_conversation_as_if_it_had_the_whole_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Reference] = []

    class Recorded(StockModel):
        def greedy(self, *arguments: Any, **options: Any) -> Reference:
            answers.append(super().greedy(*arguments, **options))
            return answers[-1]

    monkeypatch.setattr(served, "StockModel", Recorded)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    (transport,) = InProcessRing(1).transports
    turns = StockTurns("builtin:tiny", RankPlace(0, 1, "", 0, transport))
    first, second = np.arange(40, 60), np.arange(70, 75)
    for token_ids in (first, second):
        times = turns.measure(Turn(token_ids=token_ids, max_tokens=4, name="c", is_first=token_ids is first))
        assert list(times.tokens) == sorted(times.tokens)
    whole = [*first.tolist(), *answers[0].token_ids, *second.tolist()]
    assert answers[1].token_ids == StockModel(resolve_model_path("builtin:tiny")).greedy(whole, 4).token_ids

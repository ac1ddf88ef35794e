"""Requests of a trace with block ids: scaled-down prompts that begin alike, and what is expected of their cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringserve.client import RingInfo
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.load.alike import count_differing, expected_shares, read_requests, scaled
from ringserve.services.offline.load.replay import Arrival, Outcome, replay
from ringserve.services.offline.reference import Reference
from ringserve.services.offline.simulator.trace import TracedConversation, TracedTurn, format_trace
from tests.services.offline.load.test_replay import serving


def request(at: float, prompt: int, *block_ids: int) -> TracedConversation:
    turn = TracedTurn(new_tokens=prompt, output_tokens=256, think_seconds=0.0)
    return TracedConversation(start_seconds=at, turns=(turn,), block_ids=block_ids)


TRACE = [request(0.0, 1100, 1, 2, 3), request(0.01, 1500, 1, 2, 4), request(0.02, 512, 1)]


async def test_prompts_of_equal_ids_begin_alike_and_have_scaled_lengths() -> None:
    arrivals = scaled(TRACE, 64, pace=2.0)
    assert [(each.at, each.prompt_tokens, each.max_tokens) for each in arrivals] == [
        (0, 17, 4),
        (0.02, 23, 4),
        (0.04, 8, 4),
    ]
    async with serving() as (gateway, target):
        outcomes = await replay(target, arrivals[:2], 30.0, 1)
    first, second = sorted((list(each.tokenized.input_ids) for each in gateway.seen), key=len)
    assert first[:16] == second[:16]
    assert (len(first), len(second)) == (17, 23)
    assert first[16] != second[16] or second[17:] != first[17:]
    assert [each.token_ids for each in outcomes] == [(), ()], "the scripted gateway repeats no tokens at the end"


def test_rings_are_simulated_with_the_room_of_the_services() -> None:
    rings = [
        RingInfo(role=role, name=f"{role}-{number}", capacity_tokens=1024)
        for role in ("prefill", "decode")
        for number in range(2)
    ]
    again = [request(100.0 * number, 1100, 1, 2, 3) for number in range(4)]
    simulated, ideal = expected_shares(again, rings, 64)
    assert ideal == pytest.approx(0.75)
    assert 0.5 < simulated <= ideal + 1e-9


def test_answers_are_compared_with_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stock:
        def __init__(self, path: Path) -> None:
            assert path == Path("model")

        def follow(self, prompt: Any, answer: Any) -> Reference:
            return Reference([prompt[0]] * len(answer), 1.0, ())

    monkeypatch.setattr("ringserve.services.offline.reference.StockModel", Stock)
    arrival = Arrival(at=0.0, kind="trace", prompt_tokens=1, max_tokens=2)
    outcomes = [Outcome(arrival, prompt=[number], token_ids=(3, 3), status="ok") for number in range(6)]
    outcomes.append(Outcome(arrival, status="unavailable"))
    assert count_differing(outcomes, Path("model"), 6) == (6, 5)
    assert count_differing(outcomes, Path("model"), 2)[0] == 2


def test_a_trace_without_blocks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turn = TracedTurn(new_tokens=5, output_tokens=5, think_seconds=0.0)
    path.write_text("".join(format_trace([TracedConversation(start_seconds=0.0, turns=(turn,))])))
    with pytest.raises(ConfigError, match="has no hash_ids"):
        read_requests(path, 5)
    path.write_text("".join(format_trace(TRACE)))
    assert read_requests(path, 2) == TRACE[:2]

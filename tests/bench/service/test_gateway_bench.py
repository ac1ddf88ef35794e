"""`python -m bench gateway`: a small load over three processes, rings whose tokens wait, and wrong options."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest

from bench.__main__ import main
from bench.service.gateway import SteppingRing
from ringserve.orchestration.protocol.turns import TokensEvent


@pytest.mark.slow
def test_it_counts_the_tokens_that_clients_get_and_the_gateways_time(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--streams", "4", "--rings", "2", "--rate", "40", "--seconds", "0.7"]
    assert main(["gateway", *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["streams"] == 4
    assert 0 < report["messages"] <= report["tokens"]
    assert report["microseconds"] == pytest.approx(1e6 * report["processor_seconds"] / report["tokens"])
    assert report["core_rate"] == pytest.approx(1e6 / report["microseconds"])
    assert report["target_met"] == (report["core_rate"] >= 20_000)


async def test_tokens_of_a_ring_that_come_within_the_pause_are_one_event() -> None:
    ring = SteppingRing(step_seconds=0.001, num_tokens=40)
    steps, told = asyncio.create_task(ring.run()), []
    async with aclosing(ring.stream_turn("turn", interval=0.02)) as events:
        async for event in events:
            if isinstance(event, TokensEvent):
                told.append(len(event.token_ids))
    steps.cancel()
    assert sum(told) == 40
    assert max(told) > 1


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--streams", "0", "--streams: 0 is out of range"), ("--rate", "-1", "--rate: -1 is out of range")],
)
def test_a_load_that_cannot_be_is_refused(
    option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", option, value]) == 1
    assert says in capsys.readouterr().err

"""Bad days: what their scenarios look at."""

from __future__ import annotations

import socket

import pytest

from bench.__main__ import main
from bench.chaos.bad_days import SCENARIOS, is_closed, longest, until


def test_the_longest_gap_is_between_neighbours() -> None:
    assert longest([]) == longest([3.0]) == 0.0
    assert longest([1.0, 1.5, 4.0, 4.1]) == 2.5


async def test_a_condition_that_is_never_met_ends_the_wait() -> None:
    answers = iter([False, True])
    assert await until(lambda: next(answers))
    assert not await until(lambda: False, seconds=0.2)


def test_a_connection_is_closed_once_its_peer_has_closed_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not is_closed(ours)
        theirs.close()
        assert is_closed(ours)


def test_every_scenario_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bad-days", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in SCENARIOS)

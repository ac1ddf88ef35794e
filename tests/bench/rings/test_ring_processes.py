"""Rings of processes that measure tasks."""

import os
from functools import partial

import pytest

from bench.rings.ring_processes import RankPlace, RingProcesses
from bench.rings.rounds import Sample, timed
from ringserve.cp_core.errors import Unavailable


class Breakable:
    """Bench rank that fails or ends on demand."""

    def __init__(self, broken_rank: int, place: RankPlace) -> None:
        self._place = place
        self._broken_rank = broken_rank

    def measure(self, task: str) -> Sample:
        if self._place.rank == self._broken_rank:
            if task == "fail":
                raise ValueError("out of luck")
            if task == "end":
                os._exit(1)
        return timed(self._place.transport, lambda: None)

    def close(self) -> None:
        """Release nothing."""


def test_every_rank_answers_every_task_until_one_fails_in_words() -> None:
    with RingProcesses(2, partial(Breakable, 0)) as ring:
        assert [len(ring.measure("work")) for _ in range(2)] == [2, 2]
        with pytest.raises(Unavailable, match="rank 0 of 2 failed: ValueError: out of luck"):
            ring.measure("fail")


def test_rank_whose_process_ends_is_noticed_at_once() -> None:
    with (
        pytest.raises(Unavailable, match="rank 0 of 2 ended unexpectedly"),
        RingProcesses(2, partial(Breakable, 0)) as ring,
    ):
        ring.measure("end")

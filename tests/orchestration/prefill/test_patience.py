"""A step that takes far longer than predicted counts as stuck."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ringserve.orchestration.prefill.loop import PATIENCE, PrefillLoop
from ringserve.orchestration.prefill.scheduler import ScheduledStep
from ringserve.workers.protocol.steps import Algorithm

STEP_TIMEOUT, LEAST = 300.0, 10.0


@pytest.mark.parametrize(
    ("work", "is_measured", "yields", "within", "seconds"),
    [
        (100.0, True, False, 0, LEAST),
        (4000.0, True, False, 0, PATIENCE * 4.0),
        (1e6, True, False, 0, STEP_TIMEOUT),
        (100.0, False, False, 0, STEP_TIMEOUT),
        (100.0, True, True, 0, STEP_TIMEOUT),
        (100.0, True, False, 7, STEP_TIMEOUT),
    ],
)
def test_a_step_has_five_times_its_prediction_where_that_is_known(
    work: float, is_measured: bool, yields: bool, within: int, seconds: float
) -> None:
    ring: Any = SimpleNamespace(
        settings=SimpleNamespace(step_timeout=STEP_TIMEOUT), least_patience=LEAST, incarnation=""
    )
    scheduler: Any = SimpleNamespace(is_measured=is_measured, rate=1000.0)
    step = ScheduledStep(number=1, algorithm=Algorithm.PASS_KV, pieces=(), work=work, yields=yields)
    assert PrefillLoop(ring, scheduler, Counter())._patience(step, within) == seconds

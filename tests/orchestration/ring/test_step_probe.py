"""Steps of a starting ring correct the rates that its ranks probed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from ringserve.cp_core.cost.model import PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.orchestration.protocol.ports import RankPort
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.ring.step_probe import (
    LEAST_LATENESS,
    LONG_TOKENS,
    MAX_FACTOR,
    SHORT_TOKENS,
    correction_of,
    lateness_of,
    measure_steps,
)
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.steps import PrefillOutput, PrefillStep
from tests.rings import GPU_RATES, LLAMA_8B

SETTINGS = RingSettings(
    role="prefill", name="ring", num_ranks=2, ranks=RankSettings(model_path="model", num_blocks=9, block_tokens=16)
)

ON_GPU = replace(SETTINGS, ranks=replace(SETTINGS.ranks, device="cuda"))


class Machine:
    """Clock, and ranks whose steps take what `seconds` says; the first step of a length takes twice that.

    Each rank begins `lateness` seconds after the first.
    """

    def __init__(self, seconds: Callable[[int], float], lateness: tuple[float, ...] = (0.0, 0.0)) -> None:
        self.now = 100.0
        self.lateness = lateness
        self.steps: list[PrefillStep] = []
        self._seconds = seconds
        self._known: set[int] = set()

    def ports(self, num_ranks: int) -> list[RankPort]:
        return [cast(RankPort, _Rank(self, number)) for number in range(num_ranks)]

    def compute(self, step: PrefillStep) -> None:
        num_tokens = step.sequences[0].layout.num_tokens
        self.now += self._seconds(num_tokens) * (1 if num_tokens in self._known else 2)
        self._known.add(num_tokens)
        self.steps.append(step)


class _Rank:
    def __init__(self, machine: Machine, number: int) -> None:
        self._machine = machine
        self._number = number

    async def prefill(self, step: PrefillStep, timeout: float) -> PrefillOutput:
        if self._number == 0:
            self._machine.compute(step)
        return PrefillOutput(seconds=1.0 - self._machine.lateness[self._number])


def predicted(rates: PrefillRates, num_tokens: int) -> float:
    return StepPredictor(LLAMA_8B.shape, rates, 2).seconds(num_tokens, 0)["pass_kv"]


@pytest.mark.parametrize(("step_seconds", "products"), [(0.03, 2.5), (0.0, 0.5), (0.4, 1.0)])
async def test_corrected_rates_predict_what_was_measured(
    step_seconds: float, products: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PrefillRates(ring=replace(GPU_RATES, gemm_flops=GPU_RATES.gemm_flops / products, step_seconds=step_seconds))
    machine = Machine(lambda num_tokens: predicted(real, num_tokens))
    monkeypatch.setattr("ringserve.orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    found = (await measure_steps(machine.ports(2), ON_GPU, LLAMA_8B, GPU_RATES)).applied(GPU_RATES)
    for num_tokens in (SHORT_TOKENS, 100, LONG_TOKENS, 5000):
        assert predicted(PrefillRates(ring=found), num_tokens) == pytest.approx(predicted(real, num_tokens), rel=1e-6)


async def test_a_ring_tells_which_rank_begins_late_and_its_steps_have_the_lateness_in_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(lambda num_tokens: 0.02 + predicted(PrefillRates(ring=GPU_RATES), num_tokens), (0.02, 0.0))
    monkeypatch.setattr("ringserve.orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    found = (await measure_steps(machine.ports(2), SETTINGS, LLAMA_8B, GPU_RATES)).applied(GPU_RATES)
    assert found.lateness == pytest.approx((0.02, 0.0))
    assert found.step_seconds == pytest.approx(0.02)


async def test_steps_take_no_more_room_than_the_ring_has_and_end_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda num_tokens: 0.01 * num_tokens)
    monkeypatch.setattr("ringserve.orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    small = replace(SETTINGS, ranks=replace(SETTINGS.ranks, num_blocks=2))
    await measure_steps(machine.ports(2), small, LLAMA_8B, GPU_RATES)
    assert {step.sequences[0].layout.num_tokens for step in machine.steps} == {SHORT_TOKENS, 2 * 2 * 16}
    for step in machine.steps:
        (sequence,) = step.sequences
        assert max(sequence.blocks) < 2
        assert not sequence.sends
    samples = [step.sequences[0].sample is not None for step in machine.steps]
    assert samples.index(False) == 1 + 2 + 1, "the head is a part of a step, and long steps count less often"


@pytest.mark.parametrize(("settings", "num_long"), [(SETTINGS, 1), (ON_GPU, 2)])
async def test_a_long_step_of_warm_ranks_is_computed_once(
    settings: RingSettings, num_long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the first of a length may compile kernels."""
    machine = Machine(lambda num_tokens: 0.01 * num_tokens)
    monkeypatch.setattr("ringserve.orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    await measure_steps(machine.ports(2), settings, LLAMA_8B, GPU_RATES)
    lengths = [step.sequences[0].layout.num_tokens for step in machine.steps]
    assert lengths.count(LONG_TOKENS) == num_long
    assert lengths[:3] == [SHORT_TOKENS] * 3, "the first short one never counts"


async def test_other_steps_may_come_between_two_that_are_measured_and_do_not_count() -> None:
    """A turn that begins meanwhile waits for one of them, not for all; a fair lock lets it go next."""
    lock, others = asyncio.Lock(), 0

    async def compute_others() -> None:
        nonlocal others
        while True:
            async with lock:
                machine.now += 1000.0
                others += 1
            await asyncio.sleep(0)

    machine = Machine(lambda num_tokens: predicted(PrefillRates(ring=GPU_RATES), num_tokens))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ringserve.orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
        competing = asyncio.create_task(compute_others())
        found = await measure_steps(machine.ports(2), SETTINGS, LLAMA_8B, GPU_RATES, alone=lambda: lock)
        competing.cancel()
    assert len(machine.steps) - 1 <= others <= len(machine.steps) + 1
    assert found.step_seconds == pytest.approx(0.0, abs=1e-9)
    assert found.products == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("measured", "step_seconds", "products"),
    [
        ((0.001, 100.0), 0.0, MAX_FACTOR),
        ((0.5, 0.001), 0.5 - 0.01 / MAX_FACTOR, 1 / MAX_FACTOR),
        ((0.01, 0.1), 0.0, 1.0),
    ],
)
def test_a_step_that_was_disturbed_corrects_within_bounds(
    measured: tuple[float, float], step_seconds: float, products: float
) -> None:
    found = correction_of(measured, (0.01, 0.1), (0.01, 0.1))
    assert found.step_seconds == pytest.approx(step_seconds)
    assert found.products == pytest.approx(products)


def test_a_rank_that_takes_less_time_than_another_has_begun_late() -> None:
    """It counts by the least of all steps, so that no disturbance of single steps makes a rank late."""
    steps = [(0.10, 0.08, 0.10), (0.13, 0.10, 0.12), (0.10, 0.07, 0.10)]
    assert lateness_of(steps, 1) == pytest.approx((0.0, 0.02, 0.0))
    assert lateness_of([*steps, (0.07, 0.1, 0.1)], 1) == ()
    assert lateness_of([(0.1, 0.1 - LEAST_LATENESS / 2)], 1) == ()


def test_a_rank_begins_with_the_last_of_its_processes() -> None:
    assert lateness_of([(0.10, 0.10, 0.10, 0.05)], 2) == pytest.approx((0.0, 0.05))

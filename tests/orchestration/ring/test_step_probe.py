"""Steps of a starting ring correct the rates that its ranks probed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import pytest

from cp_core.cost.model import PrefillRates, StepPredictor
from orchestration.protocol.ports import RankPort
from orchestration.protocol.rings import RingSettings
from orchestration.ring.step_probe import LONG_TOKENS, MAX_FACTOR, SHORT_TOKENS, correction_of, measure_steps
from tests.rings import GPU_RATES, LLAMA_8B
from workers.protocol.prefill_steps import PrefillOutput, PrefillStep
from workers.protocol.ranks import RankSettings

SETTINGS = RingSettings(
    role="prefill", name="ring", num_ranks=2, ranks=RankSettings(model_path="model", num_blocks=9, block_tokens=16)
)


class Machine:
    """Clock, and ranks whose steps take what `seconds` says; the first step of a length takes twice that."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.now = 100.0
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
        return PrefillOutput()


def predicted(rates: PrefillRates, num_tokens: int) -> float:
    return StepPredictor(LLAMA_8B.shape, rates, 2).seconds(num_tokens, 0)["pass_kv"]


@pytest.mark.parametrize(("step_seconds", "products"), [(0.03, 2.5), (0.0, 0.5), (0.4, 1.0)])
async def test_corrected_rates_predict_what_was_measured(
    step_seconds: float, products: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PrefillRates(ring=replace(GPU_RATES, gemm_flops=GPU_RATES.gemm_flops / products, step_seconds=step_seconds))
    machine = Machine(lambda num_tokens: predicted(real, num_tokens))
    monkeypatch.setattr("orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    found = (await measure_steps(machine.ports(2), SETTINGS, LLAMA_8B, GPU_RATES)).applied(GPU_RATES)
    for num_tokens in (SHORT_TOKENS, 100, LONG_TOKENS, 5000):
        assert predicted(PrefillRates(ring=found), num_tokens) == pytest.approx(predicted(real, num_tokens), rel=1e-6)


async def test_steps_take_no_more_room_than_the_ring_has_and_end_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda num_tokens: 0.01 * num_tokens)
    monkeypatch.setattr("orchestration.ring.step_probe.time.monotonic", lambda: machine.now)
    small = replace(SETTINGS, ranks=replace(SETTINGS.ranks, num_blocks=2))
    await measure_steps(machine.ports(2), small, LLAMA_8B, GPU_RATES)
    assert {step.sequences[0].layout.num_tokens for step in machine.steps} == {SHORT_TOKENS, 2 * 2 * 16}
    for step in machine.steps:
        (sequence,) = step.sequences
        assert max(sequence.blocks) < 2
        assert sequence.sample is not None, "the head is a part of a step"
        assert not sequence.sends


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

"""Corrections of a ring's rates by real steps of two lengths.

A probe of the ranks knows matrix products, attention and messages, one at a time. A step also has norms, activations,
copies, calls between its layers, and the calls of the ranks. Much of it is the same for every step, and weighs most in
short ones; the rest grows with the tokens, as the matrix products do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from cp_core.cost.model import PrefillRates, RingRates, StepPredictor
from cp_core.layout.shards import balanced_layout
from orchestration.protocol.ports import RankPort
from orchestration.protocol.rings import RingSettings
from orchestration.tasks import gather_first_error
from workers.model.info import tensor_share
from workers.protocol.prefill_steps import Algorithm, PrefillStep, SequencePrefill
from workers.protocol.ranks import ModelInfo
from workers.sampling.parameters import SamplingParameters

SHORT_TOKENS, LONG_TOKENS = 16, 256
REPEATS = 3
"""Counted steps of each length, after one that is not: the first of a shape is slower."""
MAX_FACTOR = 8.0
"""Factor by which a rate may differ from the one that was probed: beyond it something else disturbed the steps."""


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """Correction of probed rates: seconds that every step takes in addition, and a factor of its products' seconds."""

    step_seconds: float
    products: float

    def applied(self, rates: RingRates) -> RingRates:
        return replace(rates, gemm_flops=rates.gemm_flops / self.products, step_seconds=self.step_seconds)


async def measure_steps(
    ranks: Sequence[RankPort], settings: RingSettings, model: ModelInfo, rates: RingRates
) -> StepCorrection:
    """Compute steps on the ranks of a ring, and compare them with `rates`.

    They write KV to the first blocks of every rank, so the ring must not hold any. Raises Unavailable.
    """
    room = min(settings.ranks.num_blocks * settings.ranks.block_tokens * settings.num_ranks, model.max_positions)
    lengths = [max(1, min(tokens, room)) for tokens in (SHORT_TOKENS, LONG_TOKENS)]
    measured = [await _seconds(ranks, settings, num_tokens) for num_tokens in lengths]
    predictor = StepPredictor(
        tensor_share(model, settings.ranks.tp).shape, PrefillRates(ring=rates), settings.num_ranks
    )
    costs = [predictor.cost(Algorithm.PASS_KV.value, num_tokens, 0) for num_tokens in lengths]
    return correction_of(measured, [cost.total_seconds for cost in costs], [cost.linear_seconds for cost in costs])


def correction_of(measured: Sequence[float], predicted: Sequence[float], products: Sequence[float]) -> StepCorrection:
    """Return the correction for which the seconds of a short and of a long step are those that were measured.

    `products` are the seconds of matrix products in the predicted ones. What the long step takes more than predicted
    counts as theirs, within MAX_FACTOR; what remains of the short one belongs to every step.
    """
    grown = products[1] - products[0]
    factor = 1.0
    if grown > 0.0:
        extra = (measured[1] - measured[0]) - (predicted[1] - predicted[0])
        factor = min(MAX_FACTOR, max(1.0 / MAX_FACTOR, (grown + extra) / grown))
    short = predicted[0] + (factor - 1.0) * products[0]
    return StepCorrection(step_seconds=max(0.0, measured[0] - short), products=factor)


async def _seconds(ranks: Sequence[RankPort], settings: RingSettings, num_tokens: int) -> float:
    """Return the median seconds of a step with one new prompt, as the leader of a prefill ring measures them."""
    layout = balanced_layout(0, num_tokens, (0,) * settings.num_ranks)
    seconds = []
    for _ in range(REPEATS + 1):
        steps = [
            PrefillStep(
                algorithm=Algorithm.PASS_KV,
                sequences=(
                    SequencePrefill(
                        sequence_id="probe",
                        token_ids=np.zeros(num_tokens, np.int64),
                        layout=layout,
                        cached=(0,) * settings.num_ranks,
                        blocks=tuple(
                            range(-(-layout.tokens_on(rank // settings.ranks.tp) // settings.ranks.block_tokens))
                        ),
                        sample=SamplingParameters(temperature=0.0),
                    ),
                ),
            )
            for rank in range(len(ranks))
        ]
        began = time.monotonic()
        await gather_first_error(
            rank.prefill(step, settings.start_timeout) for rank, step in zip(ranks, steps, strict=True)
        )
        seconds.append(time.monotonic() - began)
    return median(seconds[1:])

"""Measurement of real steps of two lengths, and corrections of a ring's rates by them.

`Ring` calls it, and keeps the corrections. A probe of the ranks measures matrix products, attention and messages, one
at a time. A step also has norms, activations, copies, calls between its layers, and the calls of the ranks. Much of
this extra time is the same for every step, and weighs most in short ones. The rest grows with the tokens, as the time
of matrix products does.

Steps also show which rank begins late, because the leader's call takes longer to reach it. In pass-KV all ranks end
together, so a rank that takes less time than another has begun later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ringserve.cp_core.cost.model import PrefillRates
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.layout.shards import balanced_layout
from ringserve.orchestration.protocol.ports import RankPort
from ringserve.orchestration.protocol.rings import RingSettings
from ringserve.orchestration.tasks import gather_first_error
from ringserve.views import RingRates
from ringserve.workers.model.info import tensor_share
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.protocol.steps import Algorithm, PrefillOutput, PrefillStep, SequencePrefill
from ringserve.workers.sampling.parameters import SamplingParameters

SHORT_TOKENS, LONG_TOKENS = 16, 256
REPEATS, REPEAT_SECONDS = 3, 0.25
"""Most steps of each length that count, after one that does not: the first of a shape is slower.

No other begins once they have taken REPEAT_SECONDS: a moment's disturbance is a small part of a long step.
"""
MAX_FACTOR = 8.0
"""Largest factor between a probed and a corrected rate: beyond it, other work has disturbed the steps."""


LATENESS_REPEATS = 6
LEAST_LATENESS = 0.005
"""A rank that begins this many seconds after the first counts as late. On one machine, calls reach all ranks sooner."""


@dataclass(frozen=True, slots=True)
class StepCorrection:
    """Correction of probed rates.

    `step_seconds` are added to every step, and the seconds of its matrix products multiplied by `products`. `lateness`
    is by rank, empty if none is late.
    """

    step_seconds: float
    products: float
    lateness: tuple[float, ...] = ()

    def applied(self, rates: RingRates) -> RingRates:
        return replace(
            rates,
            gemm_flops=rates.gemm_flops / self.products,
            step_seconds=self.step_seconds,
            lateness=self.lateness,
        )


def lengths_of_steps(settings: RingSettings, model: ModelInfo) -> tuple[int, int]:
    """Return the tokens of the short and of the long step: no more than the ring has room for."""
    room = min(settings.ranks.num_blocks * settings.ranks.block_tokens * settings.num_ranks, model.max_positions)
    return max(1, min(SHORT_TOKENS, room)), max(1, min(LONG_TOKENS, room))


def room_for_steps(settings: RingSettings, model: ModelInfo) -> list[int]:
    """Return the tokens that each rank stores in the long step."""
    _, longest = lengths_of_steps(settings, model)
    layout = balanced_layout(0, longest, (0,) * settings.num_ranks)
    return [layout.tokens_on(rank) for rank in range(settings.num_ranks)]


Alone = Callable[[], AbstractAsyncContextManager[object]]
"""Makes a context in which the ring does nothing else."""


async def measure_steps(
    ranks: Sequence[RankPort],
    settings: RingSettings,
    model: ModelInfo,
    rates: RingRates,
    tables: Sequence[Sequence[int]] | None = None,
    alone: Alone = nullcontext,
) -> StepCorrection:
    """Compute steps on the ranks of a ring, and compare them with `rates`.

    They write KV to the blocks `tables[r]` of each rank r, which must have `room_for_steps`. Without `tables` they
    write to each rank's first blocks, and the ring must not hold any KV. Each step is `alone`; between two of them
    others may be computed. Raises Unavailable.
    """
    if tables is None:
        room = room_for_steps(settings, model)
        tables = [range(-(-tokens // settings.ranks.block_tokens)) for tokens in room]
    lengths = lengths_of_steps(settings, model)
    # On CPUs nothing is compiled by shape: after the short steps, the first long one is hardly slower than the next.
    is_warm = settings.ranks.device == "cpu"
    measured = [
        median(await _seconds(ranks, settings, num_tokens, tables, alone, is_warm=is_warm and number > 0))
        for number, num_tokens in enumerate(lengths)
    ]
    # These steps sample no token: sampling would take the rank of the last position longer, and make others look late.
    own = await _rank_seconds(ranks, settings, lengths[0], tables, alone) if settings.num_processes > 1 else []
    predictor = StepPredictor(
        tensor_share(model, settings.ranks.tp).shape, PrefillRates(ring=rates), settings.num_ranks
    )
    costs = [predictor.cost(Algorithm.PASS_KV.value, num_tokens, 0) for num_tokens in lengths]
    found = correction_of(measured, [cost.total_seconds for cost in costs], [cost.linear_seconds for cost in costs])
    return replace(found, lateness=lateness_of(own, settings.ranks.tp))


def lateness_of(steps: Sequence[Sequence[float]], tp: int) -> tuple[float, ...]:
    """Return how many seconds after the first each rank begins; process p took `steps[i][p]` seconds in step i.

    A rank begins with the last of its `tp` processes. The least lateness of all steps counts, because a disturbance
    makes now one rank late and now another. Empty if no rank is late by LEAST_LATENESS.
    """
    by_rank = [[min(step[at : at + tp]) for at in range(0, len(step), tp)] for step in steps]
    lateness = [min(late) for late in zip(*([max(own) - each for each in own] for own in by_rank), strict=True)]
    counted = tuple(late if late >= LEAST_LATENESS else 0.0 for late in lateness)
    return counted if any(counted) else ()


def correction_of(measured: Sequence[float], predicted: Sequence[float], products: Sequence[float]) -> StepCorrection:
    """Return the correction that predicts the measured seconds of a short and of a long step.

    `products` are the seconds of matrix products in the predicted ones. What the long step exceeds the short one by,
    more than predicted, is attributed to them, up to MAX_FACTOR. What the short step still exceeds its prediction by is
    added to every step.
    """
    grown = products[1] - products[0]
    factor = 1.0
    if grown > 0.0:
        extra = (measured[1] - measured[0]) - (predicted[1] - predicted[0])
        factor = min(MAX_FACTOR, max(1.0 / MAX_FACTOR, (grown + extra) / grown))
    short = predicted[0] + (factor - 1.0) * products[0]
    return StepCorrection(step_seconds=max(0.0, measured[0] - short), products=factor)


async def _seconds(
    ranks: Sequence[RankPort],
    settings: RingSettings,
    num_tokens: int,
    tables: Sequence[Sequence[int]],
    alone: Alone,
    *,
    is_warm: bool,
) -> list[float]:
    """Return the seconds of steps with one new prompt, as the leader of a prefill ring measures them.

    With `is_warm` the first step counts too, if it takes REPEAT_SECONDS.
    """
    seconds: list[float] = []
    for number in range(1 + REPEATS):
        async with alone():
            began = time.monotonic()
            await _computed(ranks, settings, num_tokens, tables, SamplingParameters(temperature=0.0))
            took = time.monotonic() - began
        if number or (is_warm and took >= REPEAT_SECONDS):
            seconds.append(took)
        if sum(seconds) >= REPEAT_SECONDS:
            break
    return seconds


async def _rank_seconds(
    ranks: Sequence[RankPort], settings: RingSettings, num_tokens: int, tables: Sequence[Sequence[int]], alone: Alone
) -> list[list[float]]:
    """Return the seconds of each process in steps that sample no token, as the ranks measure them."""
    steps = []
    for _ in range(LATENESS_REPEATS):
        async with alone():
            steps.append(await _computed(ranks, settings, num_tokens, tables, None))
    return [[output.seconds for output in outputs] for outputs in steps]


async def _computed(
    ranks: Sequence[RankPort],
    settings: RingSettings,
    num_tokens: int,
    tables: Sequence[Sequence[int]],
    sample: SamplingParameters | None,
) -> Sequence[PrefillOutput]:
    """Compute a step with one new prompt."""
    layout = balanced_layout(0, num_tokens, (0,) * settings.num_ranks)
    steps = [
        PrefillStep(
            algorithm=Algorithm.PASS_KV,
            sequences=(
                SequencePrefill(
                    sequence_id="probe",
                    token_ids=np.zeros(num_tokens, np.int64),
                    layout=layout,
                    cached=(0,) * settings.num_ranks,
                    blocks=tuple(tables[rank // settings.ranks.tp]),
                    sample=sample,
                ),
            ),
        )
        for rank in range(len(ranks))
    ]
    calls = zip(ranks, steps, strict=True)
    return await gather_first_error(rank.prefill(step, settings.start_timeout) for rank, step in calls)

"""Published times of arXiv 2411.01783 beside the predictions of the cost model, and the selectors on its table 4.

Every TTFT is predicted twice: by the shipped profile, which is fitted to all rows, and by constants fitted to the half
of the rows without it. The error of the second shows how far a prediction can be trusted. `bench papers` prints all;
pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.papers.published import (
    PROFILE,
    TABLE_4_RANKS,
    TP,
    PublishedPrefill,
    full_prefills,
    published_model,
    table_4,
    table_5,
    table_8,
    token_times,
)
from bench.papers.selectors import (
    Comparison,
    EmpiricalFit,
    algorithm_1,
    algorithm_5,
    comparisons,
    empirical,
    fit_compute_per_byte,
    fit_empirical,
)
from bench.report import Target
from ringserve.cp_core.cost.fit import StepPart, fit_prefill, predicted_prefill, predicted_step
from ringserve.cp_core.cost.model import PASS_KV, PASS_Q
from ringserve.cp_core.cost.prefill import predict_turn
from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.cost.selector import Turn, least

NOMINAL_FLOPS, NOMINAL_LINK = 800e12, 50e9
# Rates that follow from the columns of table 5.
TABLE_5_FLOPS, TABLE_5_LINK = 515e12, 26e9
PRINTED = EmpiricalFit(alpha=-1.059, beta=1.145, gamma=12.112)

Chooser = Callable[[Turn], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectorScore:
    """Score of one selector; `worst_loss` is the relative excess of its worst choice over the better algorithm."""

    name: str
    is_calibrated: bool
    chosen: tuple[str, ...]
    num_right: int
    worst_loss: float


def score_selectors(profile: HardwareProfile) -> tuple[SelectorScore, ...]:
    """Score the selectors by nominal rates, by those of table 5, as printed, and calibrated on these turns."""
    turns, whole = comparisons([row.sample for row in table_4()]), published_model().shape
    first, fifth = (fit_compute_per_byte(rule, whole, turns) for rule in (algorithm_1, algorithm_5))
    fit = fit_empirical(turns)
    decimal = EmpiricalFit(alpha=PRINTED.alpha / math.log(10), beta=PRINTED.beta / math.log(10), gamma=PRINTED.gamma)

    def smaller(turn: Turn) -> str:
        return min((PASS_KV, PASS_Q), key=lambda algorithm: _seconds(profile, turn, algorithm))

    def auto(turn: Turn) -> str:
        return least({name: _seconds(profile, turn, name) for name in (PASS_KV, PASS_Q)}, turn.num_tokens)

    named: list[tuple[str, bool, Chooser]] = [
        ("Algorithm 1, nominal", False, lambda turn: algorithm_1(turn, whole, NOMINAL_FLOPS, NOMINAL_LINK).algorithm),
        ("Algorithm 5, nominal", False, lambda turn: algorithm_5(turn, whole, NOMINAL_FLOPS, NOMINAL_LINK).algorithm),
        ("Algorithm 1, table 5", False, lambda turn: algorithm_1(turn, whole, TABLE_5_FLOPS, TABLE_5_LINK).algorithm),
        ("Algorithm 5, table 5", False, lambda turn: algorithm_5(turn, whole, TABLE_5_FLOPS, TABLE_5_LINK).algorithm),
        ("empirical as printed, ln", False, lambda turn: empirical(turn, PRINTED).algorithm),
        ("empirical as printed, log10", False, lambda turn: empirical(turn, decimal).algorithm),
        (f"Algorithm 1, C/BW {first:.0f}", True, lambda turn: algorithm_1(turn, whole, first, 1.0).algorithm),
        (f"Algorithm 5, C/BW {fifth:.0f}", True, lambda turn: algorithm_5(turn, whole, fifth, 1.0).algorithm),
        ("empirical, fitted", True, lambda turn: empirical(turn, fit).algorithm),
        ("cost model, the smaller time", True, smaller),
        # Times within 2% of each other are a tie, which pass-KV wins: that costs less than 2%.
        ("auto: cost model with ties", False, auto),
    ]
    return tuple(_score(name, is_calibrated, chooser, turns) for name, is_calibrated, chooser in named)


def _score(name: str, is_calibrated: bool, chooser: Chooser, turns: Sequence[Comparison]) -> SelectorScore:
    chosen = tuple(chooser(each.turn) for each in turns)
    losses = [
        (each.pass_kv_seconds if algorithm == PASS_KV else each.pass_q_seconds)
        / min(each.pass_kv_seconds, each.pass_q_seconds)
        - 1.0
        for each, algorithm in zip(turns, chosen, strict=True)
    ]
    return SelectorScore(
        name=name,
        is_calibrated=is_calibrated,
        chosen=chosen,
        num_right=sum(loss == 0.0 for loss in losses),
        worst_loss=max(losses),
    )


def _seconds(profile: HardwareProfile, turn: Turn, algorithm: str) -> float:
    return predict_turn(
        published_model().shape,
        profile,
        cp=turn.num_ranks,
        tp=TP,
        algorithm=algorithm,
        new_tokens=turn.new_tokens,
        cached_tokens=turn.cached_tokens,
    ).total_seconds


MAX_RMS = 0.05
MAX_ERROR = 0.10
MILLION = 1_000_000
ROWS_OF_TABLE_4 = 14


@dataclass(frozen=True, kw_only=True, slots=True)
class ReproducedRow:
    """Published and predicted seconds; `held_out`, for TTFT only, is predicted by constants fitted without the row."""

    table: str
    label: str
    published: float
    predicted: float
    held_out: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1.0

    @property
    def held_out_error(self) -> float | None:
        return None if self.held_out is None else self.held_out / self.published - 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """Rows of all tables, the selectors on table 4, and the targets."""

    prefills: tuple[ReproducedRow, ...]
    iterations: tuple[ReproducedRow, ...]
    steps: tuple[ReproducedRow, ...]
    parts: tuple[ReproducedRow, ...]
    selectors: tuple[SelectorScore, ...]
    targets: tuple[Target, ...]


def reproduce() -> Reproduction:
    """Predict every published time; takes about a second."""
    profile, model = read_profile(PROFILE), published_model()
    published = [*table_4(), *full_prefills()]
    checkered = _held_out(profile, published, _checkered_half(published))
    by_turn = _held_out(profile, published, _half_by_turn(published))
    prefills = tuple(
        ReproducedRow(
            table=row.table,
            label=row.label,
            published=row.sample.seconds,
            predicted=predicted_prefill(model.shape, profile, row.sample),
            held_out=held_out,
        )
        for row, held_out in zip(published, checkered, strict=True)
    )
    steps = tuple(
        ReproducedRow(
            table=row.table,
            label=row.label,
            published=row.sample.seconds,
            predicted=predicted_step(model.shape, model.weights, profile, row.sample),
        )
        for row in (*token_times(), *table_8())
    )
    is_whole = [row.sample.part in (StepPart.STEP, StepPart.WHOLE) for row in (*token_times(), *table_8())]
    selectors = score_selectors(profile)
    times = tuple(row for row, whole in zip(steps, is_whole, strict=True) if whole)
    parts = tuple(row for row, whole in zip(steps, is_whole, strict=True) if not whole)
    return Reproduction(
        prefills=prefills,
        iterations=tuple(_iterations(profile)),
        steps=times,
        parts=parts,
        selectors=selectors,
        targets=(*_prefill_targets(prefills, published, by_turn), *_other_targets(prefills, times, parts, selectors)),
    )


def root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def _iterations(profile: HardwareProfile) -> Iterator[ReproducedRow]:
    """Reproduce table 5. Its exchanges are transfers only; a hop of the model includes the wait for a late peer."""
    model = published_model().shape
    for row in table_5():
        cost = predict_turn(
            model,
            profile,
            cp=TABLE_4_RANKS,
            tp=TP,
            algorithm=row.algorithm,
            new_tokens=row.new_tokens,
            cached_tokens=row.cached_tokens,
        )
        messages = cost.exposed_seconds + cost.hidden_seconds
        columns = {
            "exchange": (row.exchange_seconds, messages / (TABLE_4_RANKS - 1)),
            "attention": (row.attention_seconds, cost.attention_seconds / TABLE_4_RANKS),
            "all-to-all": (row.all_to_all_seconds, cost.all_to_all_seconds),
        }
        for name, (published, predicted) in columns.items():
            if published is not None:
                label = f"CP4 {row.algorithm} T={row.new_tokens} {name}"
                yield ReproducedRow(table="5", label=label, published=published, predicted=predicted / model.num_layers)


def _prefill_targets(
    rows: Sequence[ReproducedRow], published: Sequence[PublishedPrefill], by_turn: Sequence[float]
) -> list[Target]:
    is_first = _checkered_half(published)
    errors = [row.held_out_error or 0.0 for row in rows]
    turn_errors = [seconds / row.sample.seconds - 1.0 for seconds, row in zip(by_turn, published, strict=True)]
    named = {
        "TTFT, shipped profile": [row.error for row in rows],
        "TTFT, first half by the second": [error for error, first in zip(errors, is_first, strict=True) if first],
        "TTFT, second half by the first": [error for error, first in zip(errors, is_first, strict=True) if not first],
        "TTFT, halves by whole turns": turn_errors,
    }
    return [
        target
        for name, values in named.items()
        for target in (
            _at_most(f"{name}, rms", root_mean_square(values), MAX_RMS),
            _at_most(f"{name}, worst", max(map(abs, values)), MAX_ERROR),
        )
    ]


def _other_targets(
    prefills: Sequence[ReproducedRow],
    times: Sequence[ReproducedRow],
    parts: Sequence[ReproducedRow],
    selectors: Sequence[SelectorScore],
) -> list[Target]:
    million = next(row for row in prefills if f"T={MILLION}" in row.label)
    whole = [row.error for row in times if row.table == "8"]
    tokens = [row.error for row in times if row.table != "8"]
    return [
        _at_most("1M tokens on CP16, held out", abs(million.held_out_error or 0.0), MAX_ERROR),
        _at_most("TTIT, rms", root_mean_square(tokens), MAX_RMS),
        _at_most("Table 8, whole pass-Q, rms", root_mean_square(whole), MAX_RMS),
        _at_most("Table 8, its other columns, rms", root_mean_square([row.error for row in parts]), MAX_RMS),
        *(
            Target(f"Table 4, {score.name}, rows right", float(score.num_right), float(ROWS_OF_TABLE_4), True)
            for score in selectors
            if score.is_calibrated
        ),
    ]


def _at_most(text: str, value: float, limit: float) -> Target:
    return Target(text, value, limit, is_at_least=False)


def _held_out(profile: HardwareProfile, published: Sequence[PublishedPrefill], is_first: Sequence[bool]) -> list[float]:
    """Predict the seconds of each row by constants fitted to the other half."""
    model = published_model().shape
    fitted = {
        half: fit_prefill(
            model, profile, [row.sample for row, first in zip(published, is_first, strict=True) if first != half]
        )
        for half in (True, False)
    }
    return [predicted_prefill(model, fitted[first], row.sample) for row, first in zip(published, is_first, strict=True)]


def _checkered_half(published: Sequence[PublishedPrefill]) -> list[bool]:
    """Mark one algorithm of each turn of table 4 in alternation, and every second row of the other tables."""
    halves = []
    for place, row in enumerate(published):
        turn, algorithm = divmod(place, 2)
        halves.append((turn + algorithm) % 2 == 0 if row.table == "4" else place % 2 == 0)
    return halves


def _half_by_turn(published: Sequence[PublishedPrefill]) -> list[bool]:
    """Mark every second turn of table 4 with both algorithms, and every second row of the other tables."""
    return [(place // 2 if row.table == "4" else place) % 2 == 0 for place, row in enumerate(published)]

"""What each way to choose between pass-KV and pass-Q takes on the 14 turns of arXiv 2411.01783, table 4."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cp_core.cost.fit_selector import Comparison, fit_compute_per_byte, fit_empirical
from cp_core.cost.model import PASS_KV, PASS_Q
from cp_core.cost.prefill import predict_turn
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.selector import EmpiricalFit, Turn, algorithm_1, algorithm_5, empirical, fastest
from cp_core.cost.share import process_share
from services.offline.planning.published import TABLE_4_RANKS, TP, published_model, table_4

NOMINAL_FLOPS, NOMINAL_LINK = 800e12, 50e9
# What the columns of table 5 come to.
TABLE_5_FLOPS, TABLE_5_LINK = 515e12, 26e9
PRINTED = EmpiricalFit(alpha=-1.059, beta=1.145, gamma=12.112)

Chooser = Callable[[Turn], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectorScore:
    """`chosen` of each turn. `worst_loss` is what its worst choice takes beyond the best, relative."""

    name: str
    is_calibrated: bool
    chosen: tuple[str, ...]
    num_right: int
    worst_loss: float


def comparisons() -> list[Comparison]:
    """The turns of table 4 with both their times."""
    rows = table_4()
    return [
        Comparison(
            turn=Turn(new_tokens=kv.sample.new_tokens, cached_tokens=kv.sample.cached_tokens, num_ranks=TABLE_4_RANKS),
            pass_kv_seconds=kv.sample.seconds,
            pass_q_seconds=q.sample.seconds,
        )
        for kv, q in zip(rows[::2], rows[1::2], strict=True)
    ]


def score_selectors(profile: HardwareProfile) -> tuple[SelectorScore, ...]:
    """Each as it is printed, by nominal rates, by those of table 5, and calibrated on these turns."""
    turns, whole = comparisons(), published_model().shape
    share = process_share(whole, TP)
    first, fifth = (fit_compute_per_byte(rule, whole, turns) for rule in (algorithm_1, algorithm_5))
    fit = fit_empirical(turns)
    decimal = EmpiricalFit(alpha=PRINTED.alpha / math.log(10), beta=PRINTED.beta / math.log(10), gamma=PRINTED.gamma)

    def smaller(turn: Turn) -> str:
        return min((PASS_KV, PASS_Q), key=lambda algorithm: _seconds(profile, turn, algorithm))

    def auto(turn: Turn) -> str:
        rates = profile.prefill.rates(turn.num_ranks, is_cached=turn.cached_tokens > 0)
        return fastest(turn, share, rates).algorithm

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
        # Ties within 2% go to pass-KV: that is wrong by the letter on two turns, and costs under 2%.
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

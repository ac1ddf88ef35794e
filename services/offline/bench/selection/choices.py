"""What each way to choose between pass-KV and pass-Q takes on prefills that were measured by both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from cp_core.cost.fit_selector import Comparison, best_seconds, beyond_best
from cp_core.cost.model import PASS_KV, PASS_Q, ModelShape, predict_prefill
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.selector import POLICIES, Turn, select
from cp_core.errors import ConfigError
from services.offline.calibration.grid import Cell

OWN_RATES = "auto, uncalibrated"
"""`auto` by what the ring measured of itself when it started: what it takes without a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCell:
    """Seconds of every round by each algorithm, what is predicted for both, and what each way to choose takes."""

    cell: Cell
    pass_kv: tuple[float, ...]
    pass_q: tuple[float, ...]
    predicted_pass_kv: float
    predicted_pass_q: float
    chosen: Mapping[str, str]

    @property
    def best(self) -> str:
        return PASS_KV if median(self.pass_kv) <= median(self.pass_q) else PASS_Q


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to choose: seconds over all cells, the share of them beyond the better algorithm of each cell, and the
    cells where it took the other one.
    """

    name: str
    seconds: float
    loss: float
    wrong: tuple[Cell, ...]


def judged_cells(new_tokens: Sequence[int], cached_tokens: Sequence[int], fitted: Sequence[Cell]) -> tuple[Cell, ...]:
    """Every T after every P. Raises ConfigError for one that the cost model was fitted to: it would judge itself."""
    cells = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached, new in product(cached_tokens, new_tokens))
    for cell in cells:
        if cell in fitted:
            raise ConfigError(
                f"--new, --cached: {cell.new_tokens} tokens after {cell.cached_tokens} are also of --fit-new and "
                f"--fit-cached; what is judged must not be what was fitted"
            )
    return cells


def judge(
    model: ModelShape,
    before: HardwareProfile,
    fitted: HardwareProfile,
    num_ranks: int,
    cell: Cell,
    pass_kv: Sequence[float],
    pass_q: Sequence[float],
) -> JudgedCell:
    """What every policy chooses by the profile as a router does, and `auto` by the one `before` it was fitted."""
    turn = Turn(new_tokens=cell.new_tokens, cached_tokens=cell.cached_tokens, num_ranks=num_ranks)
    rates, own = (each.prefill.rates(num_ranks, is_cached=cell.cached_tokens > 0) for each in (fitted, before))
    chosen = {name: select(name, turn, model, rates, fitted.empirical).algorithm for name in POLICIES}
    kv, q = (
        predict_prefill(model, rates, num_ranks, each, cell.new_tokens, cell.cached_tokens).total_seconds
        for each in (PASS_KV, PASS_Q)
    )
    return JudgedCell(
        cell=cell,
        pass_kv=tuple(pass_kv),
        pass_q=tuple(pass_q),
        predicted_pass_kv=kv,
        predicted_pass_q=q,
        chosen=chosen | {OWN_RATES: select("auto", turn, model, own).algorithm},
    )


def weigh(cells: Sequence[JudgedCell], num_ranks: int) -> tuple[Way, ...]:
    """Every way to choose, by the medians of all rounds; the best of each cell first, which loses nothing."""
    comparisons = [_comparison(cell, num_ranks) for cell in cells]
    names = list(cells[0].chosen)
    chosen = {"best of each cell": [cell.best for cell in cells]} | {
        name: [cell.chosen[name] for cell in cells] for name in names
    }
    return tuple(_way(name, cells, comparisons, algorithms) for name, algorithms in chosen.items())


def noise_loss(cells: Sequence[JudgedCell], num_ranks: int) -> float | None:
    """What is lost by taking in each half of the rounds what was better in the other: so much is noise, which nobody
    can foresee. None for a single round.
    """
    halves = [[_every_second(cell, start) for cell in cells] for start in (0, 1)]
    if any(not cell.pass_kv or not cell.pass_q for half in halves for cell in half):
        return None
    lost = best = 0.0
    for half, other in (halves, halves[::-1]):
        comparisons = [_comparison(cell, num_ranks) for cell in half]
        lost += beyond_best(comparisons, [cell.best == PASS_KV for cell in other])
        best += best_seconds(comparisons)
    return lost / best


def _way(name: str, cells: Sequence[JudgedCell], comparisons: Sequence[Comparison], algorithms: Sequence[str]) -> Way:
    beyond, best = beyond_best(comparisons, [each == PASS_KV for each in algorithms]), best_seconds(comparisons)
    wrong = tuple(each.cell for each, algorithm in zip(cells, algorithms, strict=True) if algorithm != each.best)
    return Way(name=name, seconds=best + beyond, loss=beyond / best, wrong=wrong)


def _comparison(cell: JudgedCell, num_ranks: int) -> Comparison:
    return Comparison(
        turn=Turn(new_tokens=cell.cell.new_tokens, cached_tokens=cell.cell.cached_tokens, num_ranks=num_ranks),
        pass_kv_seconds=median(cell.pass_kv),
        pass_q_seconds=median(cell.pass_q),
    )


def _every_second(cell: JudgedCell, start: int) -> JudgedCell:
    return JudgedCell(
        cell=cell.cell,
        pass_kv=cell.pass_kv[start::2],
        pass_q=cell.pass_q[start::2],
        predicted_pass_kv=cell.predicted_pass_kv,
        predicted_pass_q=cell.predicted_pass_q,
        chosen=cell.chosen,
    )

"""Results of the selection bench: scores of selection policies on measured prefills, and their reports.

The selection bench and the systems bench use them. Pure functions, but for one that writes a plot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table

from bench.papers.selectors import EmpiricalFit, algorithm_1, algorithm_5, empirical
from bench.report import table, told_load
from bench.selection.links import LinkRate
from ringserve.cp_core.cost.model import PASS_KV, PREFILL_ALGORITHMS, ModelShape
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.selector import NAMES, POLICIES, PROBED_TIE, Turn, fastest, select
from ringserve.cp_core.cost.steps import StepPredictor
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.calibration.fitting import Errors, Row
from ringserve.services.offline.calibration.measurement import Cell
from ringserve.services.offline.reports import save_figure
from ringserve.views import RingRates

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OWN_RATES = "auto, uncalibrated"
"""Name of the policy `auto` with the rates that the ring measured at its start, as in a ring without a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCell:
    """Cell with the seconds of every round and the prediction by algorithm, and the choice of every policy."""

    cell: Cell
    seconds: Mapping[str, tuple[float, ...]]
    predicted: Mapping[str, float]
    chosen: Mapping[str, str]

    @property
    def medians(self) -> dict[str, float]:
        return {name: median(each) for name, each in self.seconds.items()}

    @property
    def best(self) -> str:
        """Algorithm of the least median, the first of equals."""
        return min(self.seconds, key=self.medians.__getitem__)

    def rounds_from(self, start: int) -> JudgedCell:
        """Return the cell with every second round, from round `start` on."""
        return replace(self, seconds={name: each[start::2] for name, each in self.seconds.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyScore:
    """Score of a selection policy over all cells.

    `loss` is the relative excess of its `seconds` over the best algorithm of each cell; in the cells `wrong` it chose a
    slower one.
    """

    name: str
    seconds: float
    loss: float
    wrong: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorCell:
    """Prefill of `new_tokens` by ranks that divide the weights, compared with algorithms that divide the tokens.

    `over_pass_kv` are its seconds over those of pass-KV in the same round, `waits` its share of waiting for messages,
    and `ntp_waits` that of SP-NTP.
    """

    new_tokens: int
    over_pass_kv: float
    waits: float
    ntp_waits: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RingResult:
    """Result of one ring at one rate.

    `measured` are the rates of its own probe, `profile` the fit to its prefills `rows`, `fitted` and `held_out` the
    errors of the fit. `noise` is the loss of choosing by one half of the rounds, judged by the other half.
    """

    ranks: int
    rate: LinkRate
    measured: RingRates
    profile: HardwareProfile
    rows: tuple[Row, ...]
    fitted: Errors
    held_out: Errors | None
    cells: tuple[JudgedCell, ...]
    scores: tuple[PolicyScore, ...]
    noise: float | None
    tensor: tuple[TensorCell, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionReport:
    """Report of the selection bench; `disagreements` name cells with different outputs, of which there must be none."""

    settings: str
    rings: tuple[RingResult, ...]
    disagreements: tuple[str, ...]
    load: tuple[float, float] = (0.0, 0.0)

    def and_disagreements(self, found: Sequence[str]) -> SelectionReport:
        """Return the report with further disagreements."""
        return replace(self, disagreements=(*self.disagreements, *found))


def judged_cells(new_tokens: Sequence[int], cached_tokens: Sequence[int], fitted: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells of every T after every P. Raises ConfigError for a cell that the cost model is fitted to."""
    cells = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached, new in product(cached_tokens, new_tokens))
    for cell in cells:
        if cell in fitted:
            raise ConfigError(
                f"--new, --cached: {cell.new_tokens} tokens after {cell.cached_tokens} are also a cell of --fit-new "
                f"and --fit-cached; judged cells must differ from fitted ones"
            )
    return cells


def judge(
    model: ModelShape,
    before: HardwareProfile,
    fitted: HardwareProfile,
    num_ranks: int,
    cell: Cell,
    seconds: Mapping[str, Sequence[float]],
    fit: EmpiricalFit | None = None,
) -> JudgedCell:
    """Judge a cell: the choices of all policies by the fitted profile, and of `auto` by the one `before` the fit.

    The policies are the service's own, the paper's algorithms 1 and 5 and, if a `fit` is given, its empirical rule.
    """
    turn = Turn(new_tokens=cell.new_tokens, cached_tokens=cell.cached_tokens, num_ranks=num_ranks)
    rates, own = (each.prefill.rates(num_ranks, is_cached=cell.cached_tokens > 0) for each in (fitted, before))
    compute, link = rates.ring.attention_flops, rates.ring.link_bytes_per_second
    chosen = {
        OWN_RATES: fastest(turn, model, own, PROBED_TIE),
        "alg1": algorithm_1(turn, model, compute, link),
        "alg5": algorithm_5(turn, model, compute, link),
        **({} if fit is None else {"empirical": empirical(turn, fit)}),
        **{name: select(name, turn, model, rates) for name in POLICIES},
    }
    return JudgedCell(
        cell=cell,
        seconds={name: tuple(each) for name, each in seconds.items()},
        predicted=StepPredictor(model, rates, num_ranks).seconds(cell.new_tokens, cell.cached_tokens),
        chosen={name: selection.algorithm for name, selection in chosen.items()},
    )


def score_policies(cells: Sequence[JudgedCell]) -> tuple[PolicyScore, ...]:
    """Score every policy by the medians of all rounds. The first score is that of the best choice in each cell."""
    chosen = {"best of each cell": [cell.best for cell in cells]} | {
        name: [cell.chosen[name] for cell in cells] for name in cells[0].chosen
    }
    return tuple(_score(name, cells, algorithms) for name, algorithms in chosen.items())


def noise_loss(cells: Sequence[JudgedCell]) -> float | None:
    """Return the loss of choosing in each half of the rounds what was best in the other half; None for one round.

    This loss is noise, which no policy can avoid.
    """
    if any(len(rounds) < 2 for cell in cells for rounds in cell.seconds.values()):
        return None
    first, second = ([cell.rounds_from(start) for cell in cells] for start in (0, 1))
    scores = [_score("", half, [cell.best for cell in other]) for half, other in ((first, second), (second, first))]
    beyond = sum(score.loss * score.seconds / (1 + score.loss) for score in scores)
    return beyond / sum(score.seconds / (1 + score.loss) for score in scores)


def _score(name: str, cells: Sequence[JudgedCell], algorithms: Sequence[str]) -> PolicyScore:
    chosen = [(cell, algorithm) for cell, algorithm in zip(cells, algorithms, strict=True)]
    seconds = sum(cell.medians[algorithm] for cell, algorithm in chosen)
    best = sum(cell.medians[cell.best] for cell in cells)
    wrong = tuple(cell.cell for cell, algorithm in chosen if algorithm != cell.best)
    return PolicyScore(name=name, seconds=seconds, loss=seconds / best - 1.0, wrong=wrong)


WANTED = 0.03
"""Largest loss that `auto` should have."""


def losses_table(report: SelectionReport) -> Table:
    """Return a table of every policy's seconds over all cells, and its loss."""
    rows = [
        _ring_columns(ring, number)
        | {
            "way to choose": score.name,
            "seconds": f"{score.seconds:.3f}",
            "loss": f"{score.loss:.1%}",
            "wrong cells": str(len(score.wrong)),
        }
        for ring in report.rings
        for number, score in enumerate(ring.scores)
    ]
    return table(rows, title=f"selection: {report.settings}", left=("way to choose",))


def predictions_table(report: SelectionReport) -> Table:
    """Return a table of every cell's milliseconds by algorithm, and how far the fitted prediction is off."""

    def off(cell: JudgedCell, name: str) -> str:
        return f"{cell.medians[name] * 1e3:.1f} {cell.predicted[name] / cell.medians[name] - 1:+.0%}"

    rows = [
        _ring_columns(ring, number)
        | _cell_columns(cell, {name: off(cell, name) for name in PREFILL_ALGORITHMS})
        | {"auto": NAMES[cell.chosen["auto"]], "best": NAMES[cell.best]}
        for ring in report.rings
        for number, cell in enumerate(ring.cells)
    ]
    return table(rows, title="medians, and predicted over measured", left=("auto", "best"))


def wrong_table(report: SelectionReport) -> Table | None:
    """Return a table of the cells for which calibrated `auto` chose a slower algorithm; None without any.

    Each time is a median with the least and the most of all rounds.
    """
    rows = [
        _ring_columns(ring)
        | _cell_columns(cell, {name: _spread(cell.seconds[name]) for name in PREFILL_ALGORITHMS})
        | {
            "auto": NAMES[cell.chosen["auto"]],
            "lost ms": f"{(cell.medians[cell.chosen['auto']] - cell.medians[cell.best]) * 1e3:.1f}",
        }
        for ring in report.rings
        for cell in ring.cells
        if cell.chosen["auto"] != cell.best
    ]
    return table(rows, title="cells where auto took a slower one", left=("auto",)) if rows else None


def _ring_columns(ring: RingResult, number: int = 0) -> dict[str, str]:
    """Return the columns that name a ring; they are empty in all rows but its first."""
    return {"ranks": "", "rate": ""} if number else {"ranks": str(ring.ranks), "rate": str(ring.rate)}


def _cell_columns(cell: JudgedCell, by_algorithm: Mapping[str, str]) -> dict[str, str]:
    named = {f"{NAMES[name]} ms": text for name, text in by_algorithm.items()}
    return {"T": str(cell.cell.new_tokens), "P": str(cell.cell.cached_tokens)} | named


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds) * 1e3:.1f} [{min(seconds) * 1e3:.1f}-{max(seconds) * 1e3:.1f}]"


def gains_table(report: SelectionReport) -> Table:
    """Return a table of the best algorithm of each cell, and of its seconds over those of pass-KV."""
    cells = list(dict.fromkeys(cell.cell for ring in report.rings for cell in ring.cells))
    rows = []
    for each in cells:
        row = {"T": str(each.new_tokens), "P": str(each.cached_tokens)}
        for ring in report.rings:
            (cell,) = (found for found in ring.cells if found.cell == each)
            gain = cell.medians[cell.best] / cell.medians[PASS_KV]
            row[f"{ring.ranks} ranks, {ring.rate}"] = f"{NAMES[cell.best]} {gain:.2f}"
        rows.append(row)
    return table(rows, title="best algorithm of each cell, its seconds over those of pass-KV")


def ring_lines(report: SelectionReport) -> list[str]:
    """Return the rates, the fit and the noise of each ring."""
    lines = []
    for ring in report.rings:
        own, fitted = ring.measured, ring.profile.prefill
        noise = "" if ring.noise is None else f"; a choice by half of the rounds loses {ring.noise:.1%} in the others"
        chain_overlap = fitted.overlap if fitted.chain_overlap is None else fitted.chain_overlap
        held_out = "" if ring.held_out is None else f", {ring.held_out.rms:.1%} rms on held-out cells"
        lines.append(
            f"{ring.ranks} ranks, {ring.rate}: link {own.link_bytes_per_second * 8e-6:.0f} Mbit/s at its start, "
            f"{fitted.link_bytes_per_second * 8e-6:.0f} fitted, overlap {own.overlap:.2f}, {fitted.overlap:.2f} fitted"
            f", of chains {chain_overlap:.2f}; a rank alone {own.lone_speed:.2f} times as fast; "
            f"fit {ring.fitted.rms:.1%} rms{held_out}{noise}"
        )
    return lines


def closing_lines(report: SelectionReport) -> list[str]:
    """Return the loss of `auto`, any disagreement and the machine's load."""
    lines = []
    auto = [score.loss for ring in report.rings for score in ring.scores if score.name == "auto"]
    lines.append(f"auto loses {max(auto):.1%} at worst; at most {WANTED:.0%} is wanted")
    lines += [f"the algorithms DISAGREE: {text}" for text in report.disagreements]
    if not report.disagreements:
        lines.append("all algorithms gave the same logits and tokens in every cell")
    lines.append(told_load(report.load))
    return lines


def selection_json(report: SelectionReport) -> str:
    """Format one JSON object; all times in seconds, rates as texts."""
    rings = [asdict(ring) | {"rate": str(ring.rate)} for ring in report.rings]
    return json.dumps(asdict(report) | {"rings": rings})


def write_selection_plot(report: SelectionReport, path: Path) -> None:
    """Draw each algorithm's seconds over those of pass-KV, for each ring and rate.

    Points are medians of the rounds' ratios with the least and the most, lines are predictions. Raises ConfigError for
    the path.
    """
    from matplotlib.figure import Figure

    ranks = list(dict.fromkeys(ring.ranks for ring in report.rings))
    rates = list(dict.fromkeys(ring.rate for ring in report.rings))
    figure = Figure(figsize=(4.5 * len(rates), 4.0 * len(ranks)), layout="constrained")
    figure.suptitle(f"seconds over those of pass-KV, below 1 is faster\n{report.settings}")
    grid = figure.subplots(len(ranks), len(rates), squeeze=False, sharex=True)
    for ring in report.rings:
        axes = grid[ranks.index(ring.ranks)][rates.index(ring.rate)]
        loss = next(score.loss for score in ring.scores if score.name == "auto")
        axes.set_title(f"{ring.ranks} ranks, {ring.rate}: auto loses {loss:.1%}")
        axes.set(xscale="log", yscale="log", xlabel="new tokens")
        axes.axhline(1.0, color="grey", linestyle=":")
        axes.grid(True, which="both", alpha=0.3)
        others = [name for name in PREFILL_ALGORITHMS if name != PASS_KV]
        for shape, (cached, cells) in zip(MARKERS * len(ring.cells), _by_cached(ring).items(), strict=False):
            tokens = [cell.cell.new_tokens for cell in cells]
            for color, name in enumerate(others):
                _draw_ratios(axes, cells, name, f"C{color}", shape, f"{NAMES[name]}, P {cached}")
            axes.set_xticks(tokens, [str(count) for count in tokens])
            axes.set_xticks([], minor=True)
        axes.legend(fontsize="x-small")
    save_figure(figure, path)


MARKERS = "osD^v*"
"""Markers, one for each number of cached tokens; colours stand for algorithms."""


def _draw_ratios(axes: Axes, cells: Sequence[JudgedCell], name: str, color: str, marker: str, label: str) -> None:
    tokens = [cell.cell.new_tokens for cell in cells]
    paired = [
        sorted(other / kv for kv, other in zip(cell.seconds[PASS_KV], cell.seconds[name], strict=True))
        for cell in cells
    ]
    middle = [median(ratios) for ratios in paired]
    spread = [[at - ratios[0] for at, ratios in zip(middle, paired, strict=True)]]
    spread.append([ratios[-1] - at for at, ratios in zip(middle, paired, strict=True)])
    axes.errorbar(tokens, middle, yerr=spread, fmt=marker, capsize=3, color=color, label=label)
    axes.plot(tokens, [cell.predicted[name] / cell.predicted[PASS_KV] for cell in cells], color=color)


def _by_cached(ring: RingResult) -> dict[int, list[JudgedCell]]:
    """Return the cells by cached tokens, in the order of new tokens."""
    found: dict[int, list[JudgedCell]] = {}
    for cell in sorted(ring.cells, key=lambda each: each.cell):
        found.setdefault(cell.cell.cached_tokens, []).append(cell)
    return found

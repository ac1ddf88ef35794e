"""Results of the selection bench: scores of selection policies on measured prefills, and their reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median

from rich.table import Table

from cp_core.cost.fit_selector import Comparison, best_seconds, beyond_best
from cp_core.cost.model import PASS_KV, PASS_Q, ModelShape, RingRates, predict_prefill
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.selector import POLICIES, Turn, select
from cp_core.errors import ConfigError
from services.offline.bench.report import save_figure
from services.offline.bench.selection.links import LinkRate
from services.offline.calibration.fitting import Errors
from services.offline.calibration.measurement import Cell
from services.offline.terminal import simple_table

OWN_RATES = "auto, uncalibrated"
"""Name of `auto` by the rates that a ring measured at its start, as used without a profile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedCell:
    """Cell with the seconds of every round by each algorithm, both predictions, and the choice of every policy."""

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
class PolicyScore:
    """Score of a selection policy over all cells.

    `loss` is the relative excess of its `seconds` over the better algorithm of each cell; `wrong` are the cells where
    it chose the slower one.
    """

    name: str
    seconds: float
    loss: float
    wrong: tuple[Cell, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RingResult:
    """Result of one ring at one rate.

    `measured` are the rates of its own probe, `profile` the fit to its prefills, `fitted` and `held_out` the errors of
    the fit. `noise` is the loss of a choice by an earlier measurement of the same cells.
    """

    ranks: int
    rate: LinkRate
    measured: RingRates
    profile: HardwareProfile
    fitted: Errors
    held_out: Errors | None
    cells: tuple[JudgedCell, ...]
    ways: tuple[PolicyScore, ...]
    noise: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionReport:
    """Report of the selection bench; `disagreements` name cells with different outputs, of which there must be none."""

    settings: str
    rings: tuple[RingResult, ...]
    disagreements: tuple[str, ...]
    load: tuple[float, float] = (0.0, 0.0)


def judged_cells(new_tokens: Sequence[int], cached_tokens: Sequence[int], fitted: Sequence[Cell]) -> tuple[Cell, ...]:
    """Return the cells of every T after every P. Raises ConfigError for a cell that the cost model is fitted to."""
    cells = tuple(Cell(cached_tokens=cached, new_tokens=new) for cached, new in product(cached_tokens, new_tokens))
    for cell in cells:
        if cell in fitted:
            raise ConfigError(
                f"--new, --cached: {cell.new_tokens} tokens after {cell.cached_tokens} are also of --fit-new and "
                f"--fit-cached; judged cells must differ from fitted ones"
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
    """Judge a cell: the choices of all policies by the fitted profile, and of `auto` by the one `before` the fit."""
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


def score_policies(cells: Sequence[JudgedCell], num_ranks: int) -> tuple[PolicyScore, ...]:
    """Score every policy by the medians of all rounds, after the best choice of each cell, which loses nothing."""
    comparisons = [_comparison(cell, num_ranks) for cell in cells]
    names = list(cells[0].chosen)
    chosen = {"best of each cell": [cell.best for cell in cells]} | {
        name: [cell.chosen[name] for cell in cells] for name in names
    }
    return tuple(_score(name, cells, comparisons, algorithms) for name, algorithms in chosen.items())


def noise_loss(cells: Sequence[JudgedCell], num_ranks: int) -> float | None:
    """Return the loss of choosing in each half of the rounds what was better in the other half; None for one round.

    This loss is noise, which no policy can avoid.
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


def _score(
    name: str, cells: Sequence[JudgedCell], comparisons: Sequence[Comparison], algorithms: Sequence[str]
) -> PolicyScore:
    beyond, best = beyond_best(comparisons, [each == PASS_KV for each in algorithms]), best_seconds(comparisons)
    wrong = tuple(each.cell for each, algorithm in zip(cells, algorithms, strict=True) if algorithm != each.best)
    return PolicyScore(name=name, seconds=best + beyond, loss=beyond / best, wrong=wrong)


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


WANTED = 0.03
"""Largest loss wanted of `auto`."""


def losses_table(report: SelectionReport) -> Table:
    """Return a table of every policy's seconds over all cells, and its loss."""
    headers = ("ranks", "rate", "way to choose", "seconds", "loss", "wrong cells")
    table = simple_table(*headers, left_aligned=("way to choose",), title=f"selection: {report.settings}")
    for ring in report.rings:
        for number, way in enumerate(ring.ways):
            lead = ("", "") if number else (str(ring.ranks), str(ring.rate))
            table.add_row(*lead, way.name, f"{way.seconds:.3f}", f"{way.loss:.1%}", f"{len(way.wrong)}")
    return table


def wrong_table(report: SelectionReport) -> Table | None:
    """Return a table of the cells where calibrated `auto` chose the slower algorithm; None without any."""
    headers = ("ranks", "rate", "T", "P", "pass-KV ms", "least", "most", "pass-Q ms", "least", "most", "lost")
    table = simple_table(*headers, title="cells where auto took the slower one")
    for ring in report.rings:
        for cell in ring.cells:
            if cell.chosen["auto"] == cell.best:
                continue
            both = (cell.pass_kv, cell.pass_q)
            times = [value for runs in both for value in (median(runs), min(runs), max(runs))]
            lost = abs(median(cell.pass_kv) - median(cell.pass_q))
            table.add_row(
                str(ring.ranks),
                str(ring.rate),
                str(cell.cell.new_tokens),
                str(cell.cell.cached_tokens),
                *(f"{value * 1e3:.1f}" for value in (*times, lost)),
            )
    return table if table.row_count else None


def closing_lines(report: SelectionReport) -> list[str]:
    """Return the rates, the fit, the loss of `auto`, and any disagreement."""
    lines = []
    for ring in report.rings:
        own, fitted = ring.measured, ring.profile.prefill
        noise = "" if ring.noise is None else f"; the better algorithm of every other round would lose {ring.noise:.1%}"
        held_out = "" if ring.held_out is None else f", {ring.held_out.rms:.1%} rms on held-out cells"
        lines.append(
            f"{ring.ranks} ranks, {ring.rate}: link {own.link_bytes_per_second * 8e-6:.0f} Mbit/s by itself, "
            f"{fitted.link_bytes_per_second * 8e-6:.0f} fitted, overlap {own.overlap:.2f}; "
            f"fit {ring.fitted.rms:.1%} rms{held_out}{noise}"
        )
    auto = [way.loss for ring in report.rings for way in ring.ways if way.name == "auto"]
    lines.append(f"auto loses {max(auto):.1%} at worst; at most {WANTED:.0%} is wanted")
    lines += [f"the algorithms DISAGREE: {text}" for text in report.disagreements]
    if not report.disagreements:
        lines.append("both algorithms gave the same logits and tokens in every cell")
    lines.append(f"load {report.load[0]:.1f} before and {report.load[1]:.1f} after")
    return lines


def selection_json(report: SelectionReport) -> str:
    """Format one JSON object; all times in seconds, rates as texts."""
    rings = [asdict(ring) | {"rate": str(ring.rate)} for ring in report.rings]
    return json.dumps(asdict(report) | {"rings": rings})


def write_selection_plot(report: SelectionReport, path: Path) -> None:
    """Draw pass-Q over pass-KV for each ring and rate: medians with least and most as points, predictions as lines.

    Raises ConfigError for the path.
    """
    from matplotlib.figure import Figure

    ranks = list(dict.fromkeys(ring.ranks for ring in report.rings))
    rates = list(dict.fromkeys(ring.rate for ring in report.rings))
    figure = Figure(figsize=(4.5 * len(rates), 4.0 * len(ranks)), layout="constrained")
    figure.suptitle(f"pass-Q over pass-KV, above 1 pass-KV is faster\n{report.settings}")
    grid = figure.subplots(len(ranks), len(rates), squeeze=False, sharex=True)
    for ring in report.rings:
        axes = grid[ranks.index(ring.ranks)][rates.index(ring.rate)]
        loss = next(way.loss for way in ring.ways if way.name == "auto")
        axes.set_title(f"{ring.ranks} ranks, {ring.rate}: auto loses {loss:.1%}")
        axes.set(xscale="log", yscale="log", xlabel="new tokens")
        axes.axhline(1.0, color="grey", linestyle=":")
        axes.grid(True, which="both", alpha=0.3)
        for number, (cached, cells) in enumerate(_by_cached(ring).items()):
            tokens = [cell.cell.new_tokens for cell in cells]
            paired = [sorted(q / kv for kv, q in zip(cell.pass_kv, cell.pass_q, strict=True)) for cell in cells]
            middle = [median(ratios) for ratios in paired]
            spread = [[at - ratios[0] for at, ratios in zip(middle, paired, strict=True)]]
            spread.append([ratios[-1] - at for at, ratios in zip(middle, paired, strict=True)])
            axes.errorbar(tokens, middle, yerr=spread, fmt="o", capsize=3, color=f"C{number}", label=f"P {cached}")
            predicted = [cell.predicted_pass_q / cell.predicted_pass_kv for cell in cells]
            axes.plot(tokens, predicted, color=f"C{number}")
            axes.set_xticks(tokens, [str(count) for count in tokens])
            axes.set_xticks([], minor=True)
        axes.legend(fontsize="small")
    save_figure(figure, path)


def _by_cached(ring: RingResult) -> dict[int, list[JudgedCell]]:
    """Return the cells by cached tokens, in the order of new tokens."""
    found: dict[int, list[JudgedCell]] = {}
    for cell in sorted(ring.cells, key=lambda each: each.cell):
        found.setdefault(cell.cell.cached_tokens, []).append(cell)
    return found

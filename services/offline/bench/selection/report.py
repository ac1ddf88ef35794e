"""What the selection bench says: a table of losses, the cells where `auto` was wrong, JSON, a picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.box import SIMPLE
from rich.table import Table

from services.offline.bench.plot import save_figure
from services.offline.bench.selection.choices import JudgedCell
from services.offline.bench.selection.measure import RingResult, SelectionReport

WANTED = 0.03
"""At most so much `auto` should lose."""


def losses_table(report: SelectionReport) -> Table:
    """Seconds over all cells of each way to choose, and what of them is lost against the better one of each cell."""
    table = Table(title=f"selection: {report.settings}", box=SIMPLE)
    for header in ("ranks", "rate", "way to choose", "seconds", "loss", "wrong cells"):
        table.add_column(header, justify="left" if header == "way to choose" else "right", no_wrap=True)
    for ring in report.rings:
        for number, way in enumerate(ring.ways):
            lead = ("", "") if number else (str(ring.ranks), str(ring.rate))
            table.add_row(*lead, way.name, f"{way.seconds:.3f}", f"{way.loss:.1%}", f"{len(way.wrong)}")
    return table


def wrong_table(report: SelectionReport) -> Table | None:
    """Cells where `auto`, calibrated, took the slower algorithm; None where there are none."""
    table = Table(title="cells where auto took the slower one", box=SIMPLE)
    for header in ("ranks", "rate", "T", "P", "pass-KV ms", "least", "most", "pass-Q ms", "least", "most", "lost"):
        table.add_column(header, justify="right", no_wrap=True)
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
    lines = []
    for ring in report.rings:
        own, fitted = ring.measured, ring.profile.prefill
        noise = "" if ring.noise is None else f"; what was better in every other round would lose {ring.noise:.1%}"
        held_out = "" if ring.held_out is None else f", {ring.held_out.rms:.1%} rms on cells that were left out"
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
    """One object; seconds throughout, rates as texts."""
    rings = [asdict(ring) | {"rate": str(ring.rate)} for ring in report.rings]
    return json.dumps(asdict(report) | {"rings": rings})


def write_selection_plot(report: SelectionReport, path: Path) -> None:
    """For each ring and rate how pass-Q compares with pass-KV: points are medians with least and most, lines predicted.

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
    """In the order of new tokens."""
    found: dict[int, list[JudgedCell]] = {}
    for cell in sorted(ring.cells, key=lambda each: each.cell):
        found.setdefault(cell.cell.cached_tokens, []).append(cell)
    return found

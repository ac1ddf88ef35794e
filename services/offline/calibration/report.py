"""Calibration reports, measured beside predicted: a table, closing lines, one JSON object, a plot.

`ringserve calibrate` prints them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from ringserve.cp_core.cost.model import CHAIN, PASS_KV, PASS_Q
from ringserve.services.offline.calibration.fitting import Calibration, Errors, Row
from ringserve.services.offline.reports import save_figure
from ringserve.services.offline.terminal import simple_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {PASS_KV: "C0", PASS_Q: "C1", CHAIN: "C2"}


def calibration_table(calibration: Calibration) -> Table:
    """Return a table with a line for each prefill; times in milliseconds."""
    headers = ("ring", "T", "P", "algorithm", "measured ms", "least", "most", "own rates", "fitted", "held out")
    table = simple_table(*headers, left_aligned=("ring", "algorithm"), title="prefills: measured and predicted")
    for row in calibration.rows:
        sample, seconds = row.measurement.sample, row.measurement.seconds
        table.add_row(
            row.measurement.ring,
            str(sample.new_tokens),
            str(sample.cached_tokens),
            sample.algorithm,
            *(f"{value * 1e3:.2f}" for value in (sample.seconds, min(seconds), max(seconds))),
            _off(row, row.by_rates),
            _off(row, row.fitted),
            "-" if row.held_out is None else _off(row, row.held_out),
        )
    return table


def closing_lines(calibration: Calibration) -> list[str]:
    """Return the errors of the fit, the losses of each selection, and the decode steps."""
    lines = [f"fitted to all: {_errors(calibration.fitted)}"]
    if calibration.held_out is not None:
        lines.append(f"each half of the cells, by constants fitted to the other half: {_errors(calibration.held_out)}")
    lines += [f"time beyond every cell's fastest algorithm, {name}: {loss:.1%}" for name, loss in calibration.losses]
    constants = calibration.profile.prefill
    if constants.chain_overlap is not None:
        lines.append(
            f"chain: overlap {constants.chain_overlap:.2f} (ring: {constants.overlap:.2f}); "
            f"its overhead per layer is {constants.chain_overhead:.2f} of the ring's; "
            f"a rank computes {constants.lone_speed:.2f} times as fast alone as when all compute at once"
        )
    lines += [
        f"decode step after {sample.context_tokens} tokens on {sample.cp} ranks: measured {sample.seconds * 1e3:.2f} "
        f"ms, predicted {seconds * 1e3:.2f} ms"
        for sample, seconds in calibration.steps
    ]
    return lines


def calibration_json(calibration: Calibration) -> str:
    """Format one JSON object; all times in seconds."""
    return json.dumps(
        {
            "profile": asdict(calibration.profile),
            "prefills": [
                {
                    "ring": row.measurement.ring,
                    **asdict(row.measurement.sample),
                    "runs": row.measurement.seconds,
                    "predicted_by_rates": row.by_rates,
                    "predicted": row.fitted,
                    "predicted_held_out": row.held_out,
                }
                for row in calibration.rows
            ],
            "errors": asdict(calibration.fitted),
            "errors_held_out": None if calibration.held_out is None else asdict(calibration.held_out),
            "losses": dict(calibration.losses),
            "decode_steps": [{**asdict(sample), "predicted": seconds} for sample, seconds in calibration.steps],
        }
    )


def write_calibration_plot(calibration: Calibration, path: Path) -> None:
    """Draw predicted over measured seconds, and pass-Q over pass-KV. Raises ConfigError for the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.8), layout="constrained")
    figure.suptitle(f"Prefills of {calibration.profile.name}: measured and predicted")
    _draw_predictions(figure.add_subplot(1, 2, 1, xlabel="measured, seconds", ylabel="predicted, seconds"), calibration)
    _draw_ratios(figure.add_subplot(1, 2, 2, xlabel="new tokens", ylabel="pass-Q over pass-KV"), calibration)
    save_figure(figure, path)


def _draw_predictions(axes: Axes, calibration: Calibration) -> None:
    for algorithm, color in COLORS.items():
        rows = [row for row in calibration.rows if row.measurement.sample.algorithm == algorithm]
        measured = [row.measurement.sample.seconds for row in rows]
        axes.plot(measured, [row.fitted for row in rows], "o", color=color, label=f"{algorithm}, fitted")
        axes.plot(measured, [row.by_rates for row in rows], "x", color=color, label=f"{algorithm}, own rates")
    ends = [row.measurement.sample.seconds for row in calibration.rows]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color="grey", linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()


def _draw_ratios(axes: Axes, calibration: Calibration) -> None:
    """Draw measured ratios as points and predicted ones as lines; above 1 pass-KV is faster."""
    by_algorithm = {
        (row.measurement.ring, row.measurement.cell, row.measurement.sample.algorithm): row for row in calibration.rows
    }
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for (ring, cell, algorithm), kv in by_algorithm.items():
        if algorithm != PASS_KV or (q := by_algorithm.get((ring, cell, PASS_Q))) is None:
            continue
        measured = q.measurement.sample.seconds / kv.measurement.sample.seconds
        lines.setdefault(f"{ring}, P {cell.cached_tokens}", []).append(
            (cell.new_tokens, measured, q.fitted / kv.fitted)
        )
    for number, (label, points) in enumerate(lines.items()):
        tokens, measured_ratios, predicted_ratios = zip(*sorted(points), strict=True)
        axes.plot(tokens, measured_ratios, "o", color=f"C{number}", label=label)
        axes.plot(tokens, predicted_ratios, color=f"C{number}")
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.set_xscale("log")
    axes.grid(True, which="both", alpha=0.3)
    if lines:
        axes.legend()


def _errors(errors: Errors) -> str:
    return f"{errors.rms:.1%} rms, {errors.worst:.1%} at worst"


def _off(row: Row, predicted: float) -> str:
    """Format a prediction with its relative error."""
    return f"{predicted * 1e3:.2f} {predicted / row.measurement.sample.seconds - 1.0:+.0%}"

"""A picture of a report. matplotlib is an optional extra: asked for only when a picture is."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cp_core.errors import ConfigError
from services.offline.bench.figures import GEMM
from services.offline.bench.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXIS_ROOM = 1.4


def require_matplotlib() -> None:
    """Raises ConfigError, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'ringserve[plot]'")


def write_plot(report: Report, path: Path) -> None:
    """Median seconds over tokens with least and most, one line a contender. Raises ConfigError for the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.add_subplot(title=f"{report.bench}: {report.settings}", xlabel="tokens", ylabel="seconds")
    lines: dict[str, list[Row]] = {}
    for row in report.rows:
        batch = f", batch {row.batch}" if report.bench == "decode" else ""
        # The matrix product is the yardstick and has no tokens.
        if row.name != GEMM:
            lines.setdefault(f"{row.name}, {row.ranks}{batch}", []).append(row)
    for label, rows in lines.items():
        medians = [row.seconds.median for row in rows]
        below = [row.seconds.median - row.seconds.least for row in rows]
        above = [row.seconds.most - row.seconds.median for row in rows]
        axes.errorbar([row.tokens for row in rows], medians, yerr=[below, above], marker="o", capsize=3, label=label)
    tokens = sorted({row.tokens for row in report.rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Without room on both sides a single size would be an axis of no length.
    axes.set_xlim(tokens[0] / AXIS_ROOM, tokens[-1] * AXIS_ROOM)
    axes.set_xticks([], minor=True)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Raises ConfigError for the path."""
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: cannot write {path}: {error}") from error

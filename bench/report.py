"""Reports of a bench: a table for people, JSON for programs, and a plot. matplotlib is an optional extra."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.table import Table

from bench.figures import GEMM, Target
from ringserve.services.offline.reports import Summary, load_now, save_figure
from ringserve.services.offline.terminal import simple_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Row of one contender at one size. `tokens` are the new ones of a prefill, or the context of a decode step.

    `ranks` are those of a ring, or the threads of another contender. `cpu_seconds` is the processor time of the
    busiest rank, which other programs disturb less. `speedup` and `cpu_speedup` are relative to one rank. `bytes_sent`
    are those of the rank that sends most.

    Of the whole service: `over_stock` is its time over that of transformers. The time of a prefill is spent in
    `queue_seconds`, in `num_steps` steps of `steps_seconds` together, and `outside_seconds`; that of a token in one
    step of `steps_seconds`, and outside. `handoff_seconds` run from the first token to the decode ring's first one.
    """

    name: str
    ranks: int
    tokens: int
    seconds: Summary
    batch: int = 1
    cpu_seconds: float | None = None
    wait_seconds: float | None = None
    bytes_sent: float | None = None
    speedup: float | None = None
    cpu_speedup: float | None = None
    share_of_gemm_rate: float | None = None
    peak_memory_bytes: int | None = None
    over_stock: float | None = None
    num_steps: int | None = None
    queue_seconds: float | None = None
    steps_seconds: float | None = None
    outside_seconds: float | None = None
    handoff_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of a bench; `notes` name skipped cases, `load` is the machine's 1-minute load before and after."""

    bench: str
    settings: str
    rows: tuple[Row, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()
    load: tuple[float, float] = (0.0, 0.0)


RINGS_LEGEND = (
    "ranks: of a ring, else threads; over 1: speed over one rank, in CPU: by processor time; "
    "GEMM: share of the matrix-product rate of the same run"
)
SERVED_LEGEND = (
    "ranks: of each ring, else threads; ratio: over transformers; in steps, outside: milliseconds in steps of a ring, "
    "and in gateway, router and between steps; hand-off: from the first token to the decode ring's first one"
)


def with_load(report: Report, before: float) -> Report:
    return replace(report, load=(before, load_now()))


def to_json(report: Report) -> str:
    targets = [asdict(target) | {"is_met": target.is_met} for target in report.targets]
    return json.dumps(asdict(report) | {"targets": targets, "cores": len(os.sched_getaffinity(0))})


def to_table(report: Report) -> Table:
    """Return a table of the rows without empty columns."""
    columns: dict[str, list[str]] = {
        "tokens": [str(row.tokens) for row in report.rows],
        "batch": [str(row.batch) if report.bench == "decode" else "" for row in report.rows],
        "what": [row.name for row in report.rows],
        "ranks": [str(row.ranks) for row in report.rows],
        "median ms": [_milliseconds(row.seconds.p50) for row in report.rows],
        "least": [_milliseconds(row.seconds.least) for row in report.rows],
        "most": [_milliseconds(row.seconds.most) for row in report.rows],
        "CPU ms": [_optional(row.cpu_seconds, "{:.2f}", 1e3) for row in report.rows],
        "sent MB": [_optional(row.bytes_sent, "{:.2f}", 1e-6) for row in report.rows],
        "over 1": [_optional(row.speedup, "{:.2f}x") for row in report.rows],
        "in CPU": [_optional(row.cpu_speedup, "{:.2f}x") for row in report.rows],
        "GEMM": [_optional(row.share_of_gemm_rate, "{:.2f}") for row in report.rows],
        "ratio": [_optional(row.over_stock, "{:.2f}") for row in report.rows],
        "queue": [_optional(row.queue_seconds, "{:.2f}", 1e3) for row in report.rows],
        "steps": [_optional(row.num_steps, "{:d}") for row in report.rows],
        "in steps": [_optional(row.steps_seconds, "{:.2f}", 1e3) for row in report.rows],
        "outside": [_optional(row.outside_seconds, "{:.2f}", 1e3) for row in report.rows],
        "hand-off": [_optional(row.handoff_seconds, "{:.2f}", 1e3) for row in report.rows],
        "peak MB": [_optional(row.peak_memory_bytes, "{:.0f}", 1e-6) for row in report.rows],
    }
    known = {header: cells for header, cells in columns.items() if any(cells)}
    table = simple_table(*known, left_aligned=("what",), title=f"{report.bench}: {report.settings}")
    for cells in zip(*known.values(), strict=True):
        table.add_row(*cells)
    return table


def closing_lines(report: Report) -> Sequence[str]:
    """Return the targets, the notes, a legend and the load of the machine."""
    cores = len(os.sched_getaffinity(0))
    before, after = report.load
    return [
        *(str(target) for target in report.targets),
        *report.notes,
        *([SERVED_LEGEND] if any(row.over_stock is not None for row in report.rows) else [RINGS_LEGEND]),
        f"medians of {report.rows[0].seconds.count if report.rows else 0} rounds; "
        f"load {before:.1f} before and {after:.1f} after, {cores} cores",
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _optional(value: float | None, form: str, scale: float = 1) -> str:
    return "" if value is None else form.format(value * scale)


AXIS_MARGIN = 1.4


def write_plot(report: Report, path: Path) -> None:
    """Draw median, least and most seconds over tokens, one line a contender. Raises ConfigError for the path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 6.0), layout="constrained")
    axes = figure.add_subplot(title=f"{report.bench}: {report.settings}", xlabel="tokens", ylabel="seconds")
    lines: dict[str, list[Row]] = {}
    for row in report.rows:
        batch = f", batch {row.batch}" if report.bench == "decode" else ""
        # The reference matrix product has no tokens.
        if row.name != GEMM:
            lines.setdefault(f"{row.name}, {row.ranks}{batch}", []).append(row)
    for label, rows in lines.items():
        medians = [row.seconds.p50 for row in rows]
        below = [row.seconds.p50 - row.seconds.least for row in rows]
        above = [row.seconds.most - row.seconds.p50 for row in rows]
        axes.errorbar([row.tokens for row in rows], medians, yerr=[below, above], marker="o", capsize=3, label=label)
    tokens = sorted({row.tokens for row in report.rows})
    axes.set_xscale("log")
    axes.set_yscale("log")
    # Margins on both sides: a single size would give an axis of zero length.
    axes.set_xlim(tokens[0] / AXIS_MARGIN, tokens[-1] * AXIS_MARGIN)
    axes.set_xticks([], minor=True)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)

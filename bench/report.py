"""Report of a bench: rows with their figures, targets, and the report as a table, as JSON and as a plot; also progress.

The subcommands of `python -m bench` fill and print it. It touches only standard error, SIGTERM and the plot's file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from ringserve.services.offline.reports import Summary, save_figure
from ringserve.services.offline.terminal import Tell, progress_bar, simple_table

Key = int | str
Figure = Summary | float | str | None
"""Summary of a sample, one number, a text, or None if the figure was not measured."""
LINES = 20
"""Lines of progress that a long measurement writes at most if standard error is no terminal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Row of a report: `keys` say what was measured, `figures` what came of it, both by the names of `COLUMNS`.

    `Row(keys={"tokens": 4096, "what": "pass-KV", "ranks": 2}, figures={"seconds": Summary.of(seconds)})`
    """

    keys: Mapping[str, Key]
    figures: Mapping[str, Figure]

    def summary(self, name: str = "seconds") -> Summary:
        """Return a figure that is the summary of a sample."""
        found = self.figures[name]
        assert isinstance(found, Summary), f"{name} is one number"
        return found

    def number(self, name: str) -> float | None:
        """Return a figure that is one number; None if it was not measured."""
        found = self.figures.get(name)
        assert found is None or isinstance(found, (int, float)), f"{name} is no number"
        return found

    def value(self, name: str) -> float:
        """Return a figure that is one number and was measured."""
        found = self.number(name)
        assert found is not None, f"{name} was not measured"
        return found

    def as_dict(self) -> dict[str, object]:
        """Return one object of the keys and figures, for JSON."""
        figures = {name: asdict(each) if isinstance(each, Summary) else each for name, each in self.figures.items()}
        return {**self.keys, **figures}

    def cells(self) -> dict[str, str]:
        """Return the row's cells by their headers, keys first."""
        named = {name: str(value) for name, value in self.keys.items()}
        return named | {head: cell for name, figure in self.figures.items() for head, cell in _cells(name, figure)}


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a figure: its header, and the format of the number times `scale`."""

    header: str
    form: str
    scale: float = 1.0


COLUMNS = {
    "seconds": Column("ms", "{:.2f}", 1e3),
    # Processor time of the busiest rank, which other programs disturb less than the seconds.
    "cpu_seconds": Column("CPU ms", "{:.2f}", 1e3),
    # Of the rank that sends most.
    "bytes_sent": Column("sent MB", "{:.2f}", 1e-6),
    "speedup": Column("over 1", "{:.2f}x"),
    "cpu_speedup": Column("in CPU", "{:.2f}x"),
    "share_of_gemm_rate": Column("GEMM", "{:.2f}"),
    "over_stock": Column("ratio", "{:.2f}"),
    # The time of a prefill is spent in the queue, in its steps and outside; that of a token in one step and outside.
    "queue_seconds": Column("queue", "{:.2f}", 1e3),
    "num_steps": Column("steps", "{:.0f}"),
    "steps_seconds": Column("in steps", "{:.2f}", 1e3),
    "outside_seconds": Column("outside", "{:.2f}", 1e3),
    # From the first token to the decode ring's first one.
    "handoff_seconds": Column("hand-off", "{:.2f}", 1e3),
    "peak_memory_bytes": Column("peak MB", "{:.0f}", 1e-6),
    "rate": Column("rate", "{:,.3f}"),
    "gigabytes_per_second": Column("GB/s", "{:.2f}"),
    "cpu_seconds_per_gigabyte": Column("CPU s/GB", "{:.2f}"),
    "milliseconds": Column("ms", "{:.3f}"),
    "without_drafts": Column("without ms", "{:.1f}", 1e3),
    "with_drafts": Column("with ms", "{:.1f}", 1e3),
    "drafts_ratio": Column("ratio", "{:.2f}"),
    "accepted": Column("accepted", "{:.2f}"),
}
"""Figures that rows may have. A summary takes several columns."""
UNSHOWN = {"wait_seconds"}
"""Figures that the JSON has and the table leaves out."""


def _cells(name: str, figure: Figure) -> Iterator[tuple[str, str]]:
    if isinstance(figure, Summary):
        column = COLUMNS[name]
        shown = {"median": figure.p50, "least": figure.least, "most": figure.most}
        if name == "milliseconds":
            shown = {"mean": figure.mean, "p50": figure.p50, "p99": figure.p99, "most": figure.most}
        for number, (which, value) in enumerate(shown.items()):
            yield which if number else f"{which} {column.header}", column.form.format(value * column.scale)
    elif isinstance(figure, str):
        yield name, figure
    elif name not in UNSHOWN:
        column = COLUMNS[name]
        yield column.header, "" if figure is None else column.form.format(figure * column.scale)


LEFT = ("what", "case", "form", "kernel", "unit", "carrier")
"""Columns of words."""


def table(rows: Sequence[Mapping[str, str]], *, title: str | None = None, left: Collection[str] = LEFT) -> Table:
    """Return a table of cells by header, without columns that are empty in every row; those in `left` align left."""
    headers = [
        head for head in dict.fromkeys(head for row in rows for head in row) if any(row.get(head) for row in rows)
    ]
    made = simple_table(*headers, left_aligned=left, title=title)
    for row in rows:
        made.add_row(*(row.get(head, "") for head in headers))
    return made


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a measurement: `value` is at least, or at most, `limit`."""

    text: str
    value: float
    limit: float
    is_at_least: bool

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.is_at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        return "met" if self.is_met else "MISSED"

    @property
    def bound(self) -> str:
        return f"{'at least' if self.is_at_least else 'at most'} {self.limit:g}"

    def __str__(self) -> str:
        return f"{self.text}: {self.value:.3f}, {self.bound}: {self.verdict}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Report of a bench; `notes` name skipped cases, `load` is the machine's 1-minute load before and after."""

    bench: str
    settings: str
    rows: tuple[Row, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    load: tuple[float, float] = (0.0, 0.0)

    def table(self) -> Table:
        """Return a table of all rows."""
        title = f"{self.bench}: {self.settings}"
        return table([row.cells() for row in self.rows], title=title)

    def json(self) -> str:
        """Format one JSON object. A row is one object of its keys and figures."""
        targets = [asdict(target) | {"is_met": target.is_met} for target in self.targets]
        rows = [row.as_dict() for row in self.rows]
        rest = {"bench": self.bench, "settings": self.settings, "notes": self.notes, "load": self.load}
        return json.dumps(rest | {"rows": rows, "targets": targets, "cores": len(os.sched_getaffinity(0))})

    def lines(self) -> list[str]:
        """Return the targets, the notes, a legend and the load of the machine."""
        legend = SERVED_LEGEND if any("over_stock" in row.figures for row in self.rows) else RINGS_LEGEND
        rounds = self.rows[0].summary().count if self.rows else 0
        cores = len(os.sched_getaffinity(0))
        return [
            *map(str, self.targets),
            *self.notes,
            legend,
            f"medians of {rounds} rounds; {told_load(self.load)}, {cores} cores",
        ]

    def plot(self, path: Path) -> None:
        """Draw median, least and most seconds over tokens, a line per contender. Raises ConfigError for a bad path."""
        from matplotlib.figure import Figure as Drawing

        drawing = Drawing(figsize=(9.0, 6.0), layout="constrained")
        axes = drawing.add_subplot(title=f"{self.bench}: {self.settings}", xlabel="tokens", ylabel="seconds")
        lines: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.keys["what"] != GEMM:  # the reference matrix product has no tokens
                batch = f", batch {row.keys['batch']}" if "batch" in row.keys else ""
                lines.setdefault(f"{row.keys['what']}, {row.keys['ranks']}{batch}", []).append(row)
        for label, rows in lines.items():
            medians = [row.summary().p50 for row in rows]
            below = [row.summary().p50 - row.summary().least for row in rows]
            above = [row.summary().most - row.summary().p50 for row in rows]
            at = [row.keys["tokens"] for row in rows]
            axes.errorbar(at, medians, yerr=[below, above], marker="o", capsize=3, label=label)
        tokens = sorted({int(row.keys["tokens"]) for rows in lines.values() for row in rows})
        axes.set_xscale("log")
        axes.set_yscale("log")
        # Margins on both sides: a single size would give an axis of zero length.
        axes.set_xlim(tokens[0] / AXIS_MARGIN, tokens[-1] * AXIS_MARGIN)
        axes.set_xticks([], minor=True)
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
        save_figure(drawing, path)


GEMM = "GEMM"
"""Name of the matrix product that every run measures as its reference rate."""
AXIS_MARGIN = 1.4
RINGS_LEGEND = (
    "ranks: of the ring, or threads if there is none; over 1: speed over one rank, in CPU: by processor time; "
    "GEMM: share of the matrix-product rate of the same run"
)
SERVED_LEGEND = (
    "ranks: of each ring, or threads if there is none; ratio: over transformers; in steps, outside: milliseconds in "
    "steps of a ring, and in gateway, router and between steps; hand-off: from the first token to the decode ring's "
    "first one"
)


def told_load(load: tuple[float, float]) -> str:
    """Say the machine's load before and after a measurement."""
    return f"load {load[0]:.1f} before and {load[1]:.1f} after"


@contextmanager
def progress_lines(total: int) -> Iterator[Tell]:
    """Show progress as `progress_bar` does; if standard error is no terminal, in about LINES lines."""
    if sys.stderr.isatty():
        with progress_bar(total) as tell:
            yield tell
        return
    done = 0

    def write(what: str) -> None:
        nonlocal done
        done += 1
        if done * LINES // total > (done - 1) * LINES // total:
            print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)

    yield write


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the context on SIGTERM too. Only the main thread may use it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

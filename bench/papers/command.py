"""`python -m bench papers`: published times of arXiv 2411.01783 beside predictions, and the errors of these."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.table import Table

from bench.options import Subcommands
from bench.papers.reproduction import ReproducedRow, Reproduction, reproduce
from ringserve.services.offline.reports import require_matplotlib
from ringserve.services.offline.terminal import console, print_lines, print_table, simple_table
from ringserve.services.offline.units import format_seconds

CHOSEN = "chosen, from T = 1,280 to 128,000"
_table = partial(simple_table, left_aligned=("row", "what", CHOSEN))


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("papers", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="DIRECTORY", help="draw figures 6 to 9 of the paper; needs matplotlib"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        require_matplotlib()
    reproduction = reproduce()
    if options.plot is not None:
        from bench.papers.figures import write_published_figures

        written = write_published_figures(options.plot)
    if options.json:
        print(reproduction_json(reproduction))
        return 0
    out = console()
    for table in reproduction_tables(reproduction):
        print_table(out, table, num_keys=2)
    print_lines(*map(str, reproduction.targets))
    if options.plot is not None:
        print(*(f"figure: {path}" for path in written), sep="\n")
    return 0


def reproduction_json(reproduction: Reproduction) -> str:
    """Format one JSON object with rows, selectors and targets."""
    targets = [asdict(target) | {"is_met": target.is_met} for target in reproduction.targets]
    return json.dumps(asdict(reproduction) | {"targets": targets})


def reproduction_tables(reproduction: Reproduction) -> list[Table]:
    """Return tables of published and predicted times with their errors, then one of the selectors."""
    selectors = _table("what", "right of 14", "worst loss", CHOSEN, title="Selection on table 4")
    for score in reproduction.selectors:
        marks = " ".join("KV" if name == "pass_kv" else "Q" for name in score.chosen)
        selectors.add_row(score.name, str(score.num_right), f"{score.worst_loss:.1%}", marks)
    return [
        _rows("Prefill: TTFT", reproduction.prefills),
        _rows("Prefill: one ring iteration of table 5", reproduction.iterations),
        _rows("Decode: TTIT, and one layer's pass-Q", reproduction.steps),
        _rows("Decode: the other columns of table 8, one layer's", reproduction.parts),
        selectors,
    ]


def _rows(title: str, rows: Sequence[ReproducedRow]) -> Table:
    is_held_out = any(row.held_out is not None for row in rows)
    headers = ["table", "row", "published", "predicted", "error", *(["held out", "its error"] if is_held_out else [])]
    table = _table(*headers, title=title)
    for row in rows:
        cells = [row.table, row.label, *map(format_seconds, (row.published, row.predicted)), f"{row.error:+.1%}"]
        if row.held_out is not None:
            cells += [format_seconds(row.held_out), f"{row.held_out_error:+.1%}"]
        table.add_row(*cells)
    return table

"""`python -m bench papers`: published times of arXiv 2411.01783 beside predictions, and the predictions' errors."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from bench.options import Subcommands
from bench.papers.reproduction import ReproducedRow, Reproduction, reproduce
from bench.report import table
from ringserve.services.offline.reports import require_matplotlib
from ringserve.services.offline.terminal import console, print_lines, print_table
from ringserve.services.offline.units import format_seconds

CHOSEN = "chosen, from T = 1,280 to 128,000"


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
    for each in reproduction_tables(reproduction):
        print_table(out, each, num_keys=2)
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
    chosen = [
        {
            "what": score.name,
            "right of 14": str(score.num_right),
            "worst loss": f"{score.worst_loss:.1%}",
            CHOSEN: " ".join("KV" if name == "pass_kv" else "Q" for name in score.chosen),
        }
        for score in reproduction.selectors
    ]
    return [
        _rows("Prefill: TTFT", reproduction.prefills),
        _rows("Prefill: one ring iteration of table 5", reproduction.iterations),
        _rows("Decode: TTIT, and one layer's pass-Q", reproduction.steps),
        _rows("Decode: the other columns of table 8, one layer's", reproduction.parts),
        table(chosen, title="Selection on table 4", left=("what", CHOSEN)),
    ]


def _rows(title: str, rows: Sequence[ReproducedRow]) -> Table:
    cells = [
        {
            "table": row.table,
            "row": row.label,
            "published": format_seconds(row.published),
            "predicted": format_seconds(row.predicted),
            "error": f"{row.error:+.1%}",
            "held out": "" if row.held_out is None else format_seconds(row.held_out),
            "its error": "" if row.held_out is None else f"{row.held_out_error:+.1%}",
        }
        for row in rows
    ]
    return table(cells, title=title, left=("row",))

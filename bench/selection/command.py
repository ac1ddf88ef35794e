"""`python -m bench selection`: what each prefill algorithm, and the choice, is worth on links of several rates.

The bench command line registers it with `add`; `run` measures and prints the report.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.options import Subcommands
from bench.report import interrupted_by_sigterm, progress_lines
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.calibration.measurement import Cell
from ringserve.services.offline.reports import load_now, require_matplotlib
from ringserve.services.offline.terminal import console, print_table
from ringserve.services.offline.units import parse_token_counts
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info

if TYPE_CHECKING:
    from bench.selection.results import SelectionReport

EXAMPLE = """example:
  python -m bench selection
  python -m bench selection --ranks 2 --rates 20mbit,1gbit --new 64,256 --cached 0,4k --rounds 7 --plot selection.png
"""
HELP = """Rings of processes on this machine, each rank in a network namespace of its own, on links of a given rate
(Linux; needs root or user namespaces, and iproute2). At every rate a ring is calibrated as `ringserve calibrate` does,
by prefills of --fit-new tokens after --fit-cached tokens. Then all algorithms take turns to prefill every T of --new
tokens after every P of --cached tokens, round after round; tables show the seconds of each policy and its loss
against the best algorithm of each prompt, and what the best one gains over pass-KV."""
PIPE_WIDTH = 120
MOST_RANKS = 16
DEFAULTS = {
    "ranks": "2,4",
    "rates": "50mbit,200mbit,1gbit",
    "new": "64,256,768",
    "cached": "0,512,2k,4k",
    "fit_new": "32,160,512",
    "fit_cached": "0,1k,3k",
}


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "selection",
        help="prefill algorithms on links of several rates: the loss of each policy",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    for name, metavar, what in (
        ("ranks", "N,...", "ring sizes"),
        ("rates", "RATE,...", "rates of each rank's link, in the notation of `tc`"),
        ("new", "T,...", "new tokens of the judged prefills"),
        ("cached", "P,...", "cached tokens before them"),
        ("fit-new", "T,...", "new tokens of the prefills that calibrate"),
        ("fit-cached", "P,...", "cached tokens before those"),
    ):
        default = DEFAULTS[name.replace("-", "_")]
        parser.add_argument(f"--{name}", metavar=metavar, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of every prefill; medians count (default: 3)")
    parser.add_argument("--model", default="builtin:tiny", metavar="DIR", help="(default: builtin:tiny)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the figures; needs matplotlib, the extra `plot`"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    # Imported late: they import torch, which would slow the start of other commands.
    from bench.selection.links import parse_rate
    from bench.selection.measure import SelectionSettings, measured_in_namespaces
    from bench.selection.results import judged_cells, write_selection_plot

    new, fit_new = (parse_token_counts(*_given(options, name)) for name in ("--new", "--fit-new"))
    cached, fit_cached = (parse_token_counts(*_given(options, name), least=0) for name in ("--cached", "--fit-cached"))
    fit_cells = tuple(Cell(cached_tokens=each, new_tokens=count) for each in fit_cached for count in fit_new)
    settings = SelectionSettings(
        model=options.model,
        ranks=_ranks(options.ranks),
        rates=tuple(dict.fromkeys(map(parse_rate, options.rates.split(",")))),
        cells=judged_cells(new, cached, fit_cells),
        fit_cells=fit_cells,
        rounds=options.rounds,
    )
    _check(options, settings.most_tokens)
    before = load_now()
    done: SelectionReport | None = None

    def show(report: SelectionReport) -> None:
        nonlocal done
        done = replace(report, load=(before, load_now()))
        if not options.json:
            _print_latest(report)

    try:
        with interrupted_by_sigterm(), progress_lines(settings.num_measurements) as tell:
            measured_in_namespaces(settings, tell, show)
    finally:
        # An interrupted measurement reports the rates that it has finished.
        if done is not None:
            _print_whole(done, is_json=options.json)
    assert done is not None, "there is a rate"
    # The plot comes last: its failure must not hide the report.
    if options.plot is not None:
        write_selection_plot(done, options.plot)
    return 1 if done.disagreements else 0


def _print_latest(report: SelectionReport) -> None:
    """Print the rate that was measured last."""
    from bench.selection.results import (
        losses_table,
        predictions_table,
        ring_lines,
        wrong_table,
    )

    latest = replace(report, rings=report.rings[-1:])
    for table in (losses_table(latest), predictions_table(latest), wrong_table(latest)):
        if table is not None:
            print_table(console(pipe_width=PIPE_WIDTH), table, num_keys=4)
    print(*ring_lines(latest), sep="\n", flush=True)


def _print_whole(report: SelectionReport, *, is_json: bool) -> None:
    from bench.selection.results import closing_lines, gains_table, selection_json

    if is_json:
        print(selection_json(report))
        return
    print_table(console(pipe_width=PIPE_WIDTH), gains_table(report), num_keys=2)
    print(*closing_lines(report), sep="\n")


def _given(options: argparse.Namespace, name: str) -> tuple[str, str]:
    """Return an option's name and text."""
    return name, getattr(options, name.removeprefix("--").replace("-", "_"))


def _ranks(text: str) -> tuple[int, ...]:
    """Parse ring sizes. Raises ConfigError."""
    for item in text.split(","):
        if not item.strip().isdecimal() or not 2 <= int(item) <= MOST_RANKS:
            raise ConfigError(f"--ranks: {item!r} is no size of a ring with links; allowed are 2 to {MOST_RANKS}")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def _check(options: argparse.Namespace, most_tokens: int) -> None:
    """Check what would otherwise fail only after measuring. Raises ConfigError, ModelRefused."""
    if options.rounds < 1:
        raise ConfigError(f"--rounds: {options.rounds} is out of range; allowed are 1 or more")
    room = read_model_info(resolve_model_path(options.model)).max_positions
    if most_tokens > room:
        raise ConfigError(
            f"--new, --cached: {most_tokens} tokens are too long for {options.model}; allowed are at most {room}"
        )
    if options.plot is not None:
        require_matplotlib()
        if not options.plot.absolute().parent.is_dir():
            raise ConfigError(f"--plot: {options.plot} cannot be written, its directory does not exist")

"""`ringserve bench router`: plan decisions a second, with many conversations and many rings."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.table import Table

from cp_core.errors import ConfigError
from services.cli.options import Subcommands
from services.offline.bench.report import load_now
from services.offline.bench.router import RouterLoad, RouterReport, measure_router
from services.offline.planning.models import planned_model, to_model_info
from services.offline.terminal import console, print_table, progress_bar, simple_table

EXAMPLE = """example:
  ringserve bench router
  ringserve bench router --conversations 1000 --rings 50 --tokens 10000 --json
"""
HELP = """A real router in this process, with rings that reserve at once and compute nothing. Half of the rings are
prefill rings; rings have 1, 2, 4 or 8 ranks and rates that differ by 10%. A decision is one BeginTurn: match the
prompt, choose the rings, reserve, plan. Turns come one after the other, without gRPC."""
TARGET_MILLISECONDS = 1.0
PIPE_WIDTH = 120
MOST = 1_000_000


def add(kinds: Subcommands) -> None:
    parser = kinds.add_parser(
        "router",
        help="plan decisions a second with many conversations and rings",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    defaults = RouterLoad()
    parser.add_argument("--model", metavar="DIR_OR_NAME", default="llama3-8b", help="(default: llama3-8b)")
    for name, what in (
        ("conversations", "conversations that the router knows"),
        ("rings", "rings, half of them for prefill"),
        ("turns", "turns of each conversation"),
        ("tokens", "tokens of a first prompt"),
        ("follow-up", "tokens of each further prompt"),
    ):
        default = getattr(defaults, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: {default})")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = {"conversations": 1, "rings": 2, "turns": 1, "tokens": 1, "follow_up": 1}
    for name, least in names.items():
        value = getattr(options, name)
        if not least <= value <= MOST:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is out of range; allowed are {least} to {MOST}")
    load = RouterLoad(**{name: getattr(options, name) for name in names})
    model = to_model_info(planned_model(options.model))
    before = load_now()
    with progress_bar(load.conversations * load.turns) as tell:
        report = measure_router(model, load, tell)
    machine = before, load_now()
    if options.json:
        target = {"target_milliseconds": TARGET_MILLISECONDS, "is_met": _is_met(report)}
        print(json.dumps(asdict(report) | target | {"load": machine}))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), _table(report))
        print(*_closing_lines(report, machine), sep="\n")
    return 0


def _is_met(report: RouterReport) -> bool:
    return report.decision.p99 < TARGET_MILLISECONDS


def _table(report: RouterReport) -> Table:
    title = f"router: {report.conversations} conversations, {report.rings} rings, {report.decisions} decisions"
    table = simple_table("what", "mean ms", "p50", "p99", "most", left_aligned=("what",), title=title)
    rows = {
        "decision": report.decision,
        "its processor time": report.processor,
        "choice of rings in it": report.placement,
    }
    for name, figures in rows.items():
        cells = (figures.mean, figures.p50, figures.p99, figures.most)
        table.add_row(name, *(f"{value:.3f}" for value in cells))
    return table


def _closing_lines(report: RouterReport, machine: tuple[float, float]) -> list[str]:
    met = "met" if _is_met(report) else "missed"
    return [
        f"{report.decisions_per_second:.0f} decisions/s; target of p99 under {TARGET_MILLISECONDS:g} ms: {met}",
        f"{report.num_pauses} garbage collections took {report.pauses_share:.1%} of the time, "
        f"the longest {report.longest_pause:.1f} ms",
        f"{report.bytes_per_conversation / 1e3:.1f} kB a conversation at rest, "
        f"{report.token_bytes_per_conversation / 1e3:.1f} kB of them token ids",
        f"{report.kept_share:.1%} of follow-ups went to the rings of the turn before, {report.direct_share:.1%} were "
        f"computed by their decode ring; {report.rings_used} rings used",
        f"one process, turns one after the other; load {machine[0]:.1f} before and {machine[1]:.1f} after",
    ]

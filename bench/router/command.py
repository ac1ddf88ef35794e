"""`python -m bench router`: plan decisions a second, with many conversations and many rings.

The bench command line registers it with `add`; `run` measures and prints the report.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from bench.options import Subcommands
from bench.report import Row, Target, table, told_load
from bench.router.load import LoadReport, RouterLoad, measure_load
from bench.router.parts import PartsReport, measure_parts
from bench.router.restart import RestartLoad, RestartReport, measure_restart
from ringserve.cp_core.errors import ConfigError
from ringserve.services.offline.planning.models import planned_model, to_model_info
from ringserve.services.offline.reports import load_now
from ringserve.services.offline.terminal import console, print_table, progress_bar

EXAMPLE = """example:
  python -m bench router
  python -m bench router --conversations 100000 --rings 1000 --journal DIR_ON_THE_DISK
  python -m bench router --conversations 1000 --rings 50 --tokens 10000 --json
  python -m bench router --restart --conversations 100000
"""
HELP = """A real router in this process, with fake rings that reserve at once and compute nothing. Half of the rings are
prefill rings; rings have 1, 2, 4 or 8 ranks and rates that differ by 10%. A decision is one BeginTurn: match the
prompt, choose the rings, reserve, plan. Turns come one after the other, without gRPC. Every second conversation
is in a journal, or fewer if these would be over 5000. The first 20000 conversations have further turns, all others
are idle. Then parts of the router's work are measured one by one.

With --restart the journal is written first, and a router process is started with it, killed, and started again.
Rings tell it that they retain the KV of all conversations. It measures the time from the kill until the first
BeginTurn is answered over the router's port, and the decisions that follow."""
PIPE_WIDTH = 120
MOST = 1_000_000
DECISION_MILLISECONDS = 1.0
JOURNAL_MILLISECONDS = 1.0
LOOKUP_MILLISECONDS = 2.0
RESTART_SECONDS = 5.0
BLOCK_BYTES = 40.0


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
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each part (default: 20)")
    parser.add_argument(
        "--journal", metavar="DIR", default="", help="journal's directory (default: a temporary one; none: no journal)"
    )
    parser.add_argument("--restart", action="store_true", help="measure a restart from the journal instead")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    names = {"conversations": 1, "rings": 2, "turns": 1, "tokens": 1, "follow_up": 1}
    for name, least in {**names, "rounds": 1}.items():
        value = getattr(options, name)
        if not least <= value <= MOST:
            raise ConfigError(f"--{name.replace('_', '-')}: {value} is out of range; allowed are {least} to {MOST}")
    if options.restart:
        return _run_restart(options)
    load = RouterLoad(**{name: getattr(options, name) for name in names})
    model = to_model_info(planned_model(options.model))
    before = load_now()
    with _journal(options.journal) as journal, progress_bar(load.num_turns) as tell:
        report = measure_load(model, load, journal and journal / "load", tell)
        parts = measure_parts(
            load.conversations, load.rings, load.tokens, options.rounds, journal and journal / "parts"
        )
    machine, targets = (before, load_now()), _targets(report, parts)
    if options.json:
        met = {"targets": {str(each): each.is_met for each in targets}, "load": machine}
        print(json.dumps(asdict(report) | {"parts": asdict(parts)} | met))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), _table(report, parts))
        print(*_closing_lines(report, parts, machine), *targets, sep="\n")
    return 0


def _run_restart(options: argparse.Namespace) -> int:
    load = RestartLoad(conversations=options.conversations, rings=options.rings, tokens=options.tokens)
    before = load_now()
    with _journal(options.journal) as journal, progress_bar(load.conversations) as tell:
        if journal is None:
            raise ConfigError("--journal: 'none' is not allowed with --restart, which starts from a journal")
        report = measure_restart(to_model_info(planned_model(options.model)), load, journal / "restart", tell)
    seconds = report.first_decision_seconds
    target = Target("first decision after a restart (s)", seconds, RESTART_SECONDS, is_at_least=False)
    machine = (before, load_now())
    if options.json:
        print(json.dumps(asdict(report) | {"targets": {str(target): target.is_met}, "load": machine}))
    else:
        print(*_restart_lines(report, machine), target, sep="\n")
    return 0


def _restart_lines(report: RestartReport, machine: tuple[float, float]) -> list[str]:
    after = report.decisions
    return [
        f"{report.conversations} conversations in a journal of {report.journal_bytes / 1e6:.0f} MB, "
        f"{report.rings} rings",
        f"after the kill of the router the next one serves after {report.serving_seconds:.2f} s, decides after "
        f"{report.first_decision_seconds:.2f} s, and all rings have told what they retain after "
        f"{report.told_seconds:.2f} s",
        f"{report.processor_seconds:.2f} s of processor time until its first decision, "
        f"{report.memory_bytes / 1e6:.0f} MB of memory",
        f"decisions after it take {after.p50:.1f} ms (p50), {after.p99:.1f} (p99), {after.most:.1f} (most) to the "
        f"client; {report.cached_share:.1%} found KV",
        told_load(machine),
    ]


@contextmanager
def _journal(directory: str) -> Iterator[Path | None]:
    """Yield the directory of this run's journals, which is deleted at the end; None if they are switched off."""
    if directory == "none":
        yield None
        return
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"--journal: {directory!r} is no directory")
    with TemporaryDirectory(prefix="ringserve-bench-", dir=directory or None) as own:
        yield Path(own)


def _targets(report: LoadReport, parts: PartsReport) -> list[Target]:
    slowest = report.following or report.decision
    targets = [
        Target("p99 of a decision (ms)", slowest.p99, DECISION_MILLISECONDS, is_at_least=False),
        Target("lookup of 128K tokens, p50 (ms)", parts.lookup.p50, LOOKUP_MILLISECONDS, is_at_least=False),
        Target("index, bytes for 16 tokens", parts.index_bytes_per_block, BLOCK_BYTES, is_at_least=False),
    ]
    if report.journal is not None:
        added = report.journal.added.p50
        targets.append(Target("journal adds to a turn, median (ms)", added, JOURNAL_MILLISECONDS, is_at_least=False))
    return targets


def _table(report: LoadReport, parts: PartsReport) -> Table:
    title = f"router: {report.conversations} conversations, {report.rings} rings, {report.decisions} decisions"
    journal = report.journal
    rows = {
        "decision": report.decision,
        "decision of a further turn": report.following,
        "its processor time": report.processor,
        "that without garbage collections": report.uncollected,
        "choice of rings in it": report.placement,
        "turn (begin and end)": report.turn,
        "decision with a journal": journal.decision if journal else None,
        "turn with a journal": journal.turn if journal else None,
        "announcement of a ring": report.announcement,
        "lookup of a prompt of 128K tokens": parts.lookup,
        "the same among 64 branches of it": parts.branched_lookup,
        "growth in a full pool, 8 x 8192 blocks": parts.pool_growth,
        "conversations on one ring": parts.placed_at,
        "journal: begun, 1000 tokens": parts.begun,
        "journal: committed, 1000 tokens": parts.committed,
    }
    shown = [
        Row(keys={"what": name}, figures={"milliseconds": each}) for name, each in rows.items() if each is not None
    ]
    return table([row.cells() for row in shown], title=title)


def _closing_lines(report: LoadReport, parts: PartsReport, machine: tuple[float, float]) -> list[str]:
    journal = report.journal
    return [
        f"{report.decisions_per_second:.0f} decisions/s",
        *(
            [
                f"the journal adds {journal.added.p50:.3f} ms to a turn ({journal.added.least:.3f} to "
                f"{journal.added.most:.3f} in {journal.added.count} parts of the run)"
            ]
            if journal
            else []
        ),
        f"{report.num_pauses} garbage collections took {report.pauses_share:.1%} of the time, "
        f"the longest {report.longest_pause:.1f} ms",
        f"{report.bytes_per_conversation / 1e3:.1f} kB a conversation at rest, "
        f"{report.token_bytes_per_conversation / 1e3:.1f} kB of them token ids; prefix index "
        f"{parts.index_bytes_per_history:.0f} bytes a history, {parts.index_bytes_per_block:.1f} for 16 tokens; "
        f"layout {parts.layout_bytes_per_token:.1f} bytes a decoded token",
        f"{report.kept_share:.1%} of follow-ups went to the rings of the turn before, {report.direct_share:.1%} were "
        f"computed by their decode ring; {report.rings_used} rings used",
        f"one process, turns one after the other; {told_load(machine)}",
    ]

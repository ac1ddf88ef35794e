"""`python -m bench chaos`: break every kind of process under load, and show what clients saw of it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.chaos.cluster import START_SECONDS
from bench.chaos.faults import ON_WORKER, Cell, How, Kind, Phase, choose
from bench.chaos.nodes import make_hub, settings_of
from bench.chaos.run import Plan, Run
from bench.chaos.verdict import (
    MAX_DETECT_SECONDS,
    MAX_GAP_RATIO,
    MAX_LATE_SECONDS,
    Outcome,
    Result,
    Usual,
)
from bench.namespaces import isolation
from bench.options import Subcommands, add_config_options, config_of
from ringserve.cp_core.errors import ConfigError, RingserveError, Unavailable
from ringserve.services.cli.import_model import prepare
from ringserve.services.cluster.stopping import StopSignals, run_until_set
from ringserve.services.config import Config
from ringserve.services.offline.terminal import console, listing, print_lines, print_table
from ringserve.workers.model.builtin import PREFIX, TINY

EXAMPLE = """example:
  python -m bench chaos --only 'decode-rank/decoding/kill'
  python -m bench chaos --only 'router/*' --only 'gateway/*' --rounds 3
  python -m bench chaos --model builtin:smollm2 --seconds 7200 --logs chaos-logs --json > chaos.json
"""
HELP = f"""Starts a cluster of its own and plays 8 conversations of three turns to it, greedy and seeded,
with penalties and stop strings. In every cell of the matrix PROCESS x PHASE x HOW one process
is hit while the second turns are seen in that phase, or just before them (idle). All answers
must equal the answers without a fault, and greedy answers transformers'. The fault must be noticed
within {MAX_DETECT_SECONDS:g} s, and the next token come at most {MAX_LATE_SECONDS:g} s later than
without it.
No KV block and no conversation may be lost.

PROCESS: {", ".join(Kind)}
PHASE:   {", ".join(Phase)}
HOW:     {", ".join(How)} (SIGKILL, SIGSTOP, the link goes down)

Cells of raylet and node run in a cluster of two nodes on this machine, with a ring of each role on
each. The worker node is hit: its raylet by a signal, the node by a cut of its link (HOW: cut, which
no other has). It comes back after the streams have ended. A link needs network namespaces, as root
or in a user namespace; if they are refused, these cells are shown as not permitted here.

Exit status: 0 if every cell held, 1 if one was broken or the run was cut short, 130 after Ctrl-C."""
EXIT_BROKEN = 1
EXIT_INTERRUPTED = 130
PIPE_WIDTH = 100
CHUNK_TOKENS = 256
TOKENS_PER_RANK = 16384


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "chaos",
        help="break processes under load and check what clients see",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PROCESS/PHASE/HOW",
        help="run these cells alone; * stands for any text, missing parts at the end for all; repeatable",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often to run all cells (default: 1)")
    parser.add_argument("--seconds", type=float, default=7200.0, help="begin no cell after so long (default: 7200)")
    parser.add_argument(
        "--stream-seconds", type=float, default=60.0, help="deadline of each turn of the load (default: 60)"
    )
    parser.add_argument("--model", default=PREFIX + TINY, help=f"model of the cluster (default: {PREFIX}{TINY})")
    parser.add_argument("--prefill-rings", type=int, default=2, help="prefill rings (default: 2)")
    parser.add_argument("--decode-rings", type=int, default=2, help="decode rings (default: 2)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the clusters in this directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object with all cells at the end")
    parser.add_argument("--in-hub", action="store_true", help=argparse.SUPPRESS)  # in a namespace of its own
    add_config_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand."""
    cells = choose(options.only or ())
    if not cells:
        raise ConfigError(f"--only: no cell matches {' or '.join(options.only)}; see 'python -m bench chaos --help'")
    for option in ("rounds", "seconds", "stream_seconds", "prefill_rings", "decode_rings"):
        if not getattr(options, option) > 0:
            raise ConfigError(
                f"--{option.replace('_', '-')}: {getattr(options, option)} is not allowed; give 1 or more"
            )
    config = _set_up(options)
    prepare(options.model, console(stderr=True))
    if options.in_hub:
        make_hub()
    forbidden = _forbidden(options, cells, config)
    with tempfile.TemporaryDirectory(prefix="ringserve-chaos-") as temporary:
        directory = options.logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            cells=cells,
            rounds=options.rounds,
            model=options.model,
            settings=_words(options),
            directory=directory,
            seconds=options.seconds,
            stream_seconds=options.stream_seconds,
            worker_settings=_words(options, settings_of(config)),
            num_threads=sum(pool.num_threads for pool in config.pools),
            has_link=options.in_hub,
            forbidden=forbidden,
        )
        return _run(options, plan)


def _forbidden(options: argparse.Namespace, cells: Sequence[Cell], config: Config) -> dict[Kind, str]:
    """Return, by kind of cell, why this machine cannot run it.

    If cells cut links between nodes, this process must be in a hub: it replaces itself by the same command in one.
    """
    if config.model.device == "cuda":
        return dict.fromkeys(ON_WORKER, "both nodes on this machine would take its GPUs; choose model.device=cpu")
    if options.in_hub or not any(cell.kind is Kind.NODE for cell in cells):
        return {}
    try:
        prefix = isolation()
    except Unavailable as error:
        return {Kind.NODE: str(error)}
    command = [*prefix, sys.executable, "-m", "bench", *sys.argv[1:], "--in-hub"]
    os.execvp(command[0], command)


def _set_up(options: argparse.Namespace) -> Config:
    """Set what a run needs, and return the configuration. Raises ConfigError for one that `up` would refuse."""
    values = {
        "model.path": options.model,
        "prefill.rings": options.prefill_rings,
        "decode.rings": options.decode_rings,
        # Short steps, for each phase to last long enough to be seen. With shorter ones the load alone takes half the
        # time limit.
        "prefill.chunk_tokens": CHUNK_TOKENS,
        "kv_cache.tokens_per_rank": TOKENS_PER_RANK,
        "router.retain_prompts": "false",  # all KV is free again once the conversations are deleted
        "timeouts.start": START_SECONDS / 2,  # of each of two stages
        "gateway.listen": "127.0.0.1:0",
        "gateway.http": "",
        "gateway.metrics": "127.0.0.1:0",
    }
    options.set = [*(f"{key}={value}" for key, value in values.items()), *(options.set or ())]
    return config_of(options)  # before anything starts: a wrong key must not cost half a minute


def _words(options: argparse.Namespace, further: Sequence[str] = ()) -> list[str]:
    """Return the options of `ringserve up`, with further values of the configuration."""
    words = [word for item in (*options.set, *further) for word in ("--set", item)]
    return words if options.config is None else ["--config", str(options.config.resolve()), *words]


def _run(options: argparse.Namespace, plan: Plan) -> int:
    told = console(stderr=True)
    signals = StopSignals()
    began = time.monotonic()

    def tell(line: str) -> None:
        told.print(f"{time.monotonic() - began:6.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)

    chaos = Run(plan, tell)
    results: list[Result] = []

    async def collect() -> None:
        async for result in chaos.results():
            results.append(result)
            tell(_line(result))

    failure = ""
    try:
        asyncio.run(run_until_set(signals.requested, collect()))
    except RingserveError as error:
        failure = str(error)
    finally:
        chaos.stop()
    is_whole = not chaos.num_left and not failure and not signals.requested.is_set()
    has_held = is_whole and all(result.outcome is not Outcome.BROKEN for result in results)
    if options.json:
        report = {
            "held": has_held,
            "cells_left": chaos.num_left,
            "failure": failure,
            "smallest_lead": chaos.smallest_lead,
            "usual_gap_seconds": chaos.usual.gap_p99,
            "usual_longest_gap_seconds": chaos.usual.longest_gap,
            "usual_last_first_token_seconds": chaos.usual.last_first_token,
            "cells": [result.as_dict() for result in results],
        }
        print(json.dumps(report))
    else:
        _show(results, chaos)
    if failure:
        told.print(f"ringserve: {failure}", markup=False, highlight=False, soft_wrap=True)
    return EXIT_INTERRUPTED if signals.requested.is_set() else 0 if has_held else EXIT_BROKEN


def _show(results: list[Result], chaos: Run) -> None:
    table = listing("process", "phase", "how", "exact", "notice", "next", "late", "gap", "KV", "")
    for result in results:
        table.add_row(
            result.process,
            result.phase,
            result.how,
            f"{result.exact}/{result.streams}" if result.streams else "",
            _seconds(result.detect_seconds),
            _seconds(result.next_token_seconds),
            _seconds(result.late_seconds),
            _gap(result),
            str(result.free_blocks_before - result.free_blocks_after) if result.recover_seconds is not None else "",
            result.outcome,
        )
    print_table(console(pipe_width=PIPE_WIDTH), table)
    counts = {outcome: sum(result.outcome is outcome for result in results) for outcome in Outcome}
    broken = (f"{result.process}/{result.phase}/{result.how}: {'; '.join(result.reasons)}" for result in results)
    forbidden = {reason: None for result in results if result.outcome is Outcome.FORBIDDEN for reason in result.reasons}
    print_lines(
        "notice, next token and longest gap in seconds; late: how much later than without a fault the next token came; "
        "KV: blocks that are not free again",
        *_gap_lines(results, chaos.usual),
        *(line for line, result in zip(broken, results, strict=True) if result.outcome is Outcome.BROKEN),
        *(f"{Outcome.FORBIDDEN}: {reason}" for reason in forbidden),
        ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "no cell was run",
        *([f"{chaos.num_left} cells were not run: the time was over"] if chaos.num_left else []),
    )


def _line(result: Result) -> str:
    """Return a cell's outcome in one line, for those who watch."""
    return f"{result.outcome}{': ' if result.reasons else ''}{'; '.join(result.reasons)}"


def _gap(result: Result) -> str:
    """Return the longest gap; for the router, whose fault no running stream should see, also over the usual p99."""
    ratio = result.gap_ratio if result.process == Kind.ROUTER else None
    return _seconds(result.longest_gap_seconds) + (f" ({ratio:.1f}x)" if ratio is not None else "")


def _gap_lines(results: list[Result], usual: Usual) -> list[str]:
    """Return lines on the gaps without a fault and in the router's cells."""
    ratios = [each.gap_ratio for each in results if each.process == Kind.ROUTER and each.gap_ratio is not None]
    of_router = (
        f"a running stream should not see the router's restart: its longest gap is at most {max(ratios):.1f} times the "
        f"usual p99 of {usual.gap_p99:.3f} s ({MAX_GAP_RATIO:g} is the target)"
        if ratios
        else ""
    )
    without = (
        f"without a fault the last first token came after {usual.last_first_token:.1f} s, and the longest gap was "
        f"{usual.longest_gap:.3f} s"
        if usual.gap_p99
        else ""
    )
    return [line for line in (without, of_router) if line]


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"

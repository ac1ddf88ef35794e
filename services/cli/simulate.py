"""`ringserve simulate`: a trace over hundreds of rings, in simulated time."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cp_core.cost.profile import read_profile
from cp_core.errors import ConfigError
from orchestration.simulator.placement import POLICIES
from orchestration.simulator.results import SimulationResult
from orchestration.simulator.simulation import PoolShape, Simulation, SimulationSettings
from orchestration.simulator.trace import TracedConversation, TraceShape, format_trace, made_trace, read_trace
from services.cli.options import Subcommands
from services.planning.models import planned_model, to_model_info
from services.planning.sizing import require_tp
from services.planning.units import format_seconds, parse_seconds, parse_tokens

EXAMPLE = """example:
  ringserve simulate --model llama3-70b --prefill 20x2x8 --decode 20x1x8 --conversations 2000 --time 1h
  ringserve simulate --model llama3-70b --prefill 200x4x8 --decode 100x1x8 --trace trace.jsonl --json
"""
HELP = """Conversations of several turns arrive at a cluster of rings; what each turn takes is predicted by a hardware
profile, and who computes it how is decided by the code that decides it in a running cluster. Placements: `router` is
that of the service, `round_robin` looks at nothing, `kv_aware` weighs a ring's queue against the KV that it holds.
Pools are RINGSxCPxTP. The same seed makes the same conversations."""
PIPE_WIDTH = 150
MAX_TURNS = 1000


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run a trace over many rings, in simulated time",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", metavar="DIR_OR_NAME", required=True, help="a shipped shape, or a model directory")
    parser.add_argument("--hardware", metavar="PROFILE", default="gtt", help="shipped profile, or file (default: gtt)")
    parser.add_argument("--prefill", metavar="RxCPxTP", required=True, help="prefill rings, e.g. 20x2x8")
    parser.add_argument("--decode", metavar="RxCPxTP", required=True, help="decode rings, e.g. 20x1x8")
    parser.add_argument("--placement", default=",".join(POLICIES), help=f"(default: {','.join(POLICIES)})")
    parser.add_argument("--chunk", metavar="TOKENS", default="64k", help="longest prefill step (default: 64k)")
    parser.add_argument("--max-batch", type=int, default=32, help="sequences a decode ring takes (default: 32)")
    parser.add_argument("--trace", type=Path, help="conversations, one JSON object a line (default: made up)")
    parser.add_argument("--conversations", type=int, default=1000, help="of a made-up trace (default: 1000)")
    parser.add_argument(
        "--first", metavar="TOKENS,...", default="4k,32k,128k", help="of first prompts (default: 4k,32k,128k)"
    )
    parser.add_argument("--turns", type=float, default=4.0, help="of a conversation, on average (default: 4)")
    parser.add_argument("--time", metavar="TIME", default="1h", help="in which they begin (default: 1h)")
    parser.add_argument("--seed", type=int, default=0, help="of a made-up trace (default: 0)")
    parser.add_argument("--write-trace", type=Path, metavar="FILE", help="write the trace, as --trace takes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    settings, trace = _settings(options), _trace(options)
    if options.write_trace is not None:
        try:
            options.write_trace.write_text(format_trace(trace), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write-trace: cannot write {options.write_trace}: {error}") from error
    results = [
        Simulation(replace(settings, placement=placement), trace).run()
        for placement in dict.fromkeys(options.placement.split(","))
    ]
    if options.json:
        print(json.dumps({"results": [asdict(result) for result in results]}))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(_table(results))
        print(f"{results[0].num_turns} turns of {len(trace)} conversations; TTFT since a turn was first asked for")
    return 0


def _settings(options: argparse.Namespace) -> SimulationSettings:
    model = planned_model(options.model)
    prefill, decode = _pool("--prefill", options.prefill), _pool("--decode", options.decode)
    for pool in (prefill, decode):
        require_tp(model, pool.tp)
    for key, value in (("--max-batch", options.max_batch), ("--conversations", options.conversations)):
        if value < 1:
            raise ConfigError(f"{key}: {value} is none; allowed are 1 or more")
    return SimulationSettings(
        model=to_model_info(model),
        weights=model.weights,
        profile=read_profile(options.hardware),
        prefill=prefill,
        decode=decode,
        placement=next(iter(POLICIES)),
        chunk_tokens=parse_tokens("--chunk", options.chunk),
        max_batch=options.max_batch,
    )


def _trace(options: argparse.Namespace) -> list[TracedConversation]:
    if options.trace is not None:
        return read_trace(options.trace)
    if not 1.0 <= options.turns <= MAX_TURNS:
        raise ConfigError(f"--turns: {options.turns} is no mean of turns; allowed are 1 to {MAX_TURNS}")
    shape = TraceShape(
        num_conversations=options.conversations,
        seconds=parse_seconds("--time", options.time),
        first_tokens=tuple(parse_tokens("--first", item) for item in options.first.split(",")),
        mean_turns=options.turns,
    )
    return made_trace(shape, options.seed)


def _pool(key: str, text: str) -> PoolShape:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,3})x([1-9]\d{0,2})", text)
    if found is None:
        raise ConfigError(f"{key}: {text!r} is no pool; allowed are those like 20x2x8, rings x cp x tp")
    rings, cp, tp = map(int, found.groups())
    return PoolShape(num_rings=rings, cp=cp, tp=tp)


def _table(results: list[SimulationResult]) -> Table:
    table = Table(box=SIMPLE)
    headers = ("placement", "TTFT p50", "p90", "p99", "mean", "TTIT", "cached", "pass-Q", "busy", "busiest", "retries")
    for header in headers:
        table.add_column(header, justify="left" if header == "placement" else "right", no_wrap=True)
    for each in results:
        times = (each.ttft_median, each.ttft_p90, each.ttft_p99, each.ttft_mean, each.ttit_mean)
        shares = (each.cached_share, each.pass_q_share, each.busy_share, each.busiest_share)
        cells = [*map(format_seconds, times), *(f"{share:.1%}" for share in shares)]
        table.add_row(each.placement, *cells, str(each.num_retries))
    return table

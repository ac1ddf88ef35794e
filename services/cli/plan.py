"""`ringserve plan`: size a cluster by prediction."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.services.cli.options import Subcommands
from ringserve.services.config.rings import PrefillConfig
from ringserve.services.offline.planning.models import PlannedModel, planned_model
from ringserve.services.offline.planning.proposal import Proposal, Traffic, propose
from ringserve.services.offline.planning.report import (
    plan_json,
    plan_table,
    proposal_lines,
    proposal_table,
)
from ringserve.services.offline.planning.sizing import (
    RingForecast,
    RingShape,
    Workload,
    first_that_fits,
    forecast_ring,
    require_tp,
)
from ringserve.services.offline.reports import require_matplotlib
from ringserve.services.offline.terminal import console, print_lines, print_table
from ringserve.services.offline.units import (
    format_tokens,
    parse_contexts,
    parse_rate,
    parse_seconds,
    parse_sizes,
    parse_tokens,
)

EXAMPLE = r"""example:
  ringserve plan --model llama3-405b-fp8 --hardware gtt --context 128k,1m --chunk 64k
  ringserve plan --model llama3-405b-fp8 --hardware gtt --context 128k:9,1m:1 --chunk whole \
      --rate 0.1/s --ttft 60s --ttit 100ms
  ringserve plan --model ./my-model --hardware ./measured.json --context 64k --cp 1,2,4 --tp 2 --plot plan.png
"""
HELP = """Predicts time to first token, time between tokens, KV memory and throughput of rings, and the number and
shape of rings that a traffic mix needs. 128k is 128,000 tokens."""
CP_SIZES = (1, 2, 4, 8, 16, 32, 64)
CHUNK_TOKENS = PrefillConfig().chunk_tokens
WHOLE = "whole"


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "plan",
        help="size a cluster by prediction",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="a shipped shape, or a model directory")
    parser.add_argument(
        "--hardware", metavar="PROFILE", default="gtt", help="a shipped profile or a file (default: gtt)"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="its device: KV on cpu is float32 (default: cuda)"
    )
    parser.add_argument("--context", metavar="TOKENS,...", help="prompt lengths; 128k:9,1m:1 weighs them")
    parser.add_argument("--cached", type=float, default=0.0, help="share of a prompt that is cached (default: 0)")
    parser.add_argument(
        "--chunk",
        metavar="TOKENS",
        help=f"longest prefill step, or 'whole' for prompts in one step (default: {CHUNK_TOKENS}, the service's)",
    )
    parser.add_argument("--cp", metavar="N,...", help=f"ranks of a ring (default: {','.join(map(str, CP_SIZES))})")
    parser.add_argument("--tp", metavar="N,...", help="processes of a rank (default: the most on one host)")
    parser.add_argument("--rate", metavar="TURNS", help="traffic, e.g. 0.1/s or 360/h: proposes a cluster for it")
    parser.add_argument("--output", metavar="TOKENS", default="256", help="tokens a turn writes (default: 256)")
    parser.add_argument("--ttft", metavar="TIME", help="limit of the mean time to first token, e.g. 60s")
    parser.add_argument("--ttit", metavar="TIME", help="limit of the time between tokens, e.g. 100ms")
    parser.add_argument("--max-batch", type=int, default=32, help="sequences a decode ring takes (default: 32)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the plan; needs matplotlib",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        require_matplotlib()
    for name in ("model", "context"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name}: no value is given; it is required")
    model, profile = planned_model(options.model, options.device), read_profile(options.hardware)
    workload, traffic = _workload(options), _traffic(options)
    shapes = [RingShape(cp=cp, tp=tp) for tp in _tp_sizes(options, model, profile) for cp in _cp_sizes(options)]
    forecasts = [forecast_ring(model, profile, shape, workload) for shape in shapes]
    smallest = first_that_fits(forecasts)
    proposal = None if traffic is None else propose(model, profile, workload, traffic, forecasts)
    if options.plot is not None:
        from ringserve.services.offline.planning.figures import write_plan_figure

        write_plan_figure(f"{model.name} on {profile.name}", forecasts, options.plot)
    if options.json:
        print(plan_json(forecasts, proposal))
        return 0
    _print_plan(model, profile, workload, forecasts, smallest)
    if proposal is not None and traffic is not None:
        _print_proposal(proposal, workload, traffic)
    return 0


def _print_plan(
    model: PlannedModel,
    profile: HardwareProfile,
    workload: Workload,
    forecasts: list[RingForecast],
    smallest: RingForecast,
) -> None:
    print_table(console(), plan_table(forecasts), num_keys=3)
    refusals = [forecast.refusal for forecast in forecasts if forecast.refusal]
    if refusals:
        print_lines(f"no: {refusals[0]}" + (f"; and {len(refusals) - 1} more" if len(refusals) > 1 else ""))
    shape = smallest.shape
    mix = "it" if len(workload.contexts) == 1 else "the whole mix"
    print_lines(f"{model.name} on {profile.name}: the smallest ring that holds {mix} is cp {shape.cp} x tp {shape.tp}")
    if workload.chunk_tokens is not None and workload.chunk_tokens < workload.longest:
        print_lines(
            f"prompts are computed in steps of {workload.chunk_tokens:,} tokens (prefill.chunk_tokens): longer steps "
            f"save messages and take memory (--chunk 64k, or {WHOLE} for one step)"
        )
    if workload.longest > model.max_positions:
        made_for = format_tokens(model.max_positions)
        print_lines(
            f"{model.name} was made for {made_for} tokens: longer contexts are predicted without regard to quality"
        )


def _print_proposal(proposal: Proposal, workload: Workload, traffic: Traffic) -> None:
    print_table(console(), proposal_table(proposal))
    print_lines(*proposal_lines(proposal, workload, traffic))


def _workload(options: argparse.Namespace) -> Workload:
    if not 0.0 <= options.cached < 1.0:
        raise ConfigError(f"--cached: {options.cached} is no share; allowed are 0 to below 1")
    return Workload(
        contexts=parse_contexts("--context", options.context),
        cached_share=options.cached,
        chunk_tokens=_chunk_tokens(options.chunk),
    )


def _chunk_tokens(text: str | None) -> int | None:
    """Return the longest step; None for whole prompts. Raises ConfigError."""
    if text is None:
        return CHUNK_TOKENS
    return None if text == WHOLE else parse_tokens("--chunk", text)


def _traffic(options: argparse.Namespace) -> Traffic | None:
    """Return the traffic, None without --rate. Raises ConfigError for limits without a rate."""
    if options.rate is None:
        for name in ("ttft", "ttit"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name}: a limit needs traffic; give --rate too")
        return None
    if options.max_batch < 1:
        raise ConfigError(f"--max-batch: {options.max_batch} is no batch; allowed are 1 or more")
    return Traffic(
        turns_per_second=parse_rate("--rate", options.rate),
        output_tokens=parse_tokens("--output", options.output),
        max_ttft_seconds=None if options.ttft is None else parse_seconds("--ttft", options.ttft),
        max_ttit_seconds=None if options.ttit is None else parse_seconds("--ttit", options.ttit),
        max_batch=options.max_batch,
    )


def _cp_sizes(options: argparse.Namespace) -> list[int]:
    return list(CP_SIZES) if options.cp is None else parse_sizes("--cp", options.cp)


def _tp_sizes(options: argparse.Namespace, model: PlannedModel, profile: HardwareProfile) -> list[int]:
    """Return the given sizes, by default the largest that divides the KV heads and fits one host."""
    if options.tp is None:
        heads = model.shape.num_kv_heads
        return [max(size for size in range(1, profile.processes_per_host + 1) if heads % size == 0)]
    sizes = parse_sizes("--tp", options.tp)
    for size in sizes:
        require_tp(model, size)
    return sizes

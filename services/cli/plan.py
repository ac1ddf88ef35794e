"""`ringserve plan`: size a cluster by prediction.

It reads the model's and the profile's files, and writes only the figure of --plot.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.cost.profile import HardwareProfile, read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.services.cli.command import command, one_of, option
from ringserve.services.cli.options import JsonFlag, PlotFile
from ringserve.services.config.sections import PrefillConfig
from ringserve.services.offline.planning.models import PlannedModel, planned_model
from ringserve.services.offline.planning.proposal import Traffic, propose
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

WHOLE = "whole"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: str = option("a shipped shape, or a model directory", "DIR_OR_NAME")
    hardware: str = option("a shipped profile or a file", "PROFILE", "gtt")
    device: str = one_of("device of the hardware; KV on cpu is float32", ("cuda", "cpu"), "cuda")
    context: str = option("prompt lengths; 128k:9,1m:1 is nine of 128k for each of 1m", "TOKENS,...")
    cached: float = option("share of a prompt that is cached", "SHARE", 0.0)
    accepted: float = option("share of drafts that are right; 0 plans without drafts", "SHARE", 0.0)
    chunk: str = option(
        "longest prefill step (default: the service's); 'whole' computes a prompt in one step",
        "TOKENS",
        str(PrefillConfig().chunk_tokens),
    )
    cp: str = option("ranks of a ring", "N,...", "1,2,4,8,16,32,64")
    tp: str = option("processes of a rank (default: the most on one host)", "N,...", "")
    rate: str = option("traffic, e.g. 0.1/s or 360/h: proposes a cluster for it", "TURNS", "")
    output: str = option("tokens a turn writes", "TOKENS", "256")
    ttft: str = option("limit of the mean time to first token, e.g. 60s", "TIME", "")
    ttit: str = option("limit of the time between tokens, e.g. 100ms", "TIME", "")
    max_batch: int = option("sequences a decode ring takes", default=32, min=1)
    json: JsonFlag = False
    plot: PlotFile = None


@command(
    "ringserve plan --model llama3-405b-fp8 --hardware gtt --context 128k,1m --chunk 64k",
    "ringserve plan --model llama3-405b-fp8 --hardware gtt --context 128k:9,1m:1 --chunk whole --rate 0.1/s "
    "--ttft 60s --ttit 100ms",
    "ringserve plan --model ./my-model --hardware ./measured.json --context 64k --cp 1,2,4 --tp 2 --plot plan.png",
    description="""Predicts time to first token, time between tokens, KV memory and throughput of rings, and the number
and shape of rings that a traffic mix needs. 128k is 128,000 tokens.""",
)
def plan(options: PlanOptions) -> int:
    if options.plot is not None:
        require_matplotlib()
    model, profile = planned_model(options.model, options.device), read_profile(options.hardware)
    workload, traffic = _workload(options), _traffic(options)
    shapes = [
        RingShape(cp=cp, tp=tp) for tp in _tp_sizes(options, model, profile) for cp in parse_sizes("--cp", options.cp)
    ]
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
        print_table(console(), proposal_table(proposal))
        print_lines(*proposal_lines(proposal, workload, traffic))
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
        others = f"; other rings that do not fit: {len(refusals) - 1}" if len(refusals) > 1 else ""
        print_lines(f'"no" in the table: {refusals[0]}{others}')
    shape = smallest.shape
    mix = "the context" if len(workload.contexts) == 1 else "the whole mix"
    print_lines(f"{model.name} on {profile.name}: the smallest ring that holds {mix} is cp {shape.cp} x tp {shape.tp}")
    if workload.chunk_tokens is not None and workload.chunk_tokens < workload.longest:
        print_lines(
            f"prompts are computed in steps of {workload.chunk_tokens:,} tokens (prefill.chunk_tokens): longer steps "
            f"save messages and take memory (--chunk 64k, or {WHOLE} for one step)"
        )
    if workload.accepted_share:
        drafted = smallest.contexts[0]
        print_lines(
            f"TTIT assumes that {workload.accepted_share:.0%} of all drafts are right: a step of one sequence checks "
            f"{drafted.num_drafts} drafts on that ring and gives {drafted.tokens_per_step:.1f} tokens"
        )
    if workload.longest > model.max_positions:
        made_for = format_tokens(model.max_positions)
        print_lines(
            f"{model.name} was made for {made_for} tokens: longer contexts are predicted without regard to quality"
        )


def _workload(options: PlanOptions) -> Workload:
    if not 0.0 <= options.cached < 1.0:
        raise ConfigError(f"--cached: {options.cached} is no share; allowed are 0 to below 1")
    if not 0.0 <= options.accepted < 1.0:
        raise ConfigError(f"--accepted: {options.accepted} is no share; allowed are 0 to below 1")
    return Workload(
        accepted_share=options.accepted,
        contexts=parse_contexts("--context", options.context),
        cached_share=options.cached,
        chunk_tokens=None if options.chunk == WHOLE else parse_tokens("--chunk", options.chunk),
    )


def _traffic(options: PlanOptions) -> Traffic | None:
    """Return the traffic, None without --rate. Raises ConfigError for limits without a rate."""
    if not options.rate:
        for name in ("ttft", "ttit"):
            if getattr(options, name):
                raise ConfigError(f"--{name}: a limit needs traffic; give --rate too")
        return None
    return Traffic(
        turns_per_second=parse_rate("--rate", options.rate),
        output_tokens=parse_tokens("--output", options.output),
        max_ttft_seconds=parse_seconds("--ttft", options.ttft) if options.ttft else None,
        max_ttit_seconds=parse_seconds("--ttit", options.ttit) if options.ttit else None,
        max_batch=options.max_batch,
    )


def _tp_sizes(options: PlanOptions, model: PlannedModel, profile: HardwareProfile) -> list[int]:
    """Return the given sizes, by default the largest that divides the KV heads and fits one host."""
    if not options.tp:
        heads = model.shape.num_kv_heads
        return [max(size for size in range(1, profile.processes_per_host + 1) if heads % size == 0)]
    sizes = parse_sizes("--tp", options.tp)
    for size in sizes:
        require_tp(model, size)
    return sizes

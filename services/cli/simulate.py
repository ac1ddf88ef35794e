"""`ringserve simulate`: run a trace over hundreds of rings, in simulated time."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from rich.table import Table
from typer import BadParameter

from ringserve.cp_core.cost.profile import read_profile
from ringserve.cp_core.errors import ConfigError
from ringserve.orchestration.placement.scaling import ScalingSettings
from ringserve.services.cli.command import command, option
from ringserve.services.cli.options import JsonFlag
from ringserve.services.offline.planning.models import planned_model, to_model_info
from ringserve.services.offline.planning.sizing import require_tp
from ringserve.services.offline.reports import require_matplotlib
from ringserve.services.offline.simulator.cluster import ClusterShape, PoolShape, conversations_for
from ringserve.services.offline.simulator.placement import POLICIES
from ringserve.services.offline.simulator.results import SimulationResult, write_simulation_plot
from ringserve.services.offline.simulator.scaling import WAYS, ScalingShape
from ringserve.services.offline.simulator.shared import ideal_share
from ringserve.services.offline.simulator.simulation import Simulation
from ringserve.services.offline.simulator.trace import (
    FirstPrompts,
    SyntheticTrace,
    TracedConversation,
    TraceShape,
    around,
    format_trace,
    read_trace,
)
from ringserve.services.offline.terminal import bar, console, print_lines, print_table, simple_table
from ringserve.services.offline.units import format_seconds, parse_seconds, parse_tokens

PIPE_WIDTH = 170
MAX_TURNS = 1000
MAX_JOBS = 64

Trace = SyntheticTrace | list[TracedConversation]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    model: str = option("a shipped shape, or a model directory", "DIR_OR_NAME")
    hardware: str = option("a shipped profile or a file", "PROFILE", "gtt")
    prefill: str = option("prefill rings, e.g. 20x2x8", "RxCPxTP")
    decode: str = option("decode rings, e.g. 20x1x8", "RxCPxTP")
    placement: str = option("placements to compare", "NAME,...", ",".join(POLICIES))
    chunk: str = option("longest prefill step", "TOKENS", "64k")
    max_batch: int = option("sequences a decode ring takes", default=32, min=1)
    kv_tokens: str = option(
        "KV tokens that all rings of a role hold together (default: what memory holds)", "TOKENS", ""
    )
    trace: Path | None = option(
        "conversations or Mooncake's requests, a JSON object a line (default: synthetic)", default=None
    )
    conversations: int | None = option("conversations of a synthetic trace (default: 1000)", default=None, min=1)
    busy: float | None = option("as many conversations as keep prefill rings this busy, e.g. 0.6", "SHARE", None)
    first: str = option(
        "sizes of first prompts; a single size T stands for T/1.5 to 1.5 T",
        "TOKENS[-TOKENS][:WEIGHT],...",
        "4k,32k,128k",
    )
    turns: float = option("mean turns of a conversation", "N", 4.0, min=1, max=MAX_TURNS)
    answer: str = option("mean tokens of an answer", "TOKENS", "300")
    time: str = option("span in which conversations begin", "TIME", "1h")
    seed: int = option("seed of a synthetic trace", default=0)
    write_trace: Path | None = option("write the trace, as --trace takes it", default=None)
    scale: str = option("rules that stop and start rings, to compare: none, load, busy", "WAY,...", "none")
    least: int = option("rings of a role that always serve", default=1, min=1)
    ring_start: str = option("time until a ring that is started again serves", "TIME", "90s")
    max_wait: str = option("with `load`: start a ring again if a prompt would wait longer", "TIME", "2s")
    target: float = option("with --scale: share of a ring's time or room to be in use", "SHARE", 0.6)
    jobs: int = option("placements simulated at a time", default=1, min=1, max=MAX_JOBS)
    json: JsonFlag = False
    plot: Path | None = option("draw TTFT over time and by size of turn", "FILE.png", None)

    def __post_init__(self) -> None:
        if self.conversations is not None and self.busy is not None:
            raise BadParameter("--conversations, --busy: give one of them at most")


@command(
    "ringserve simulate --model llama3-70b --prefill 20x2x8 --decode 20x1x8 --conversations 2000 --time 1h",
    "ringserve simulate --model llama3-70b --prefill 20x2x8 --decode 20x1x8 --busy 0.6 --time 24h "
    "--first 500-4k:50,8k-128k:45,1m:5 --jobs 2 --plot day.png",
    "ringserve simulate --model llama3-70b --prefill 200x4x8 --decode 100x1x8 --trace trace.jsonl --json",
    "ringserve simulate --model llama3-70b --prefill 8x2x8 --decode 8x1x8 --kv-tokens 20m --max-batch 64 "
    "--trace examples/traces/conversation_trace.jsonl.gz --placement router,least_loaded,round_robin",
    "ringserve simulate --model llama3-70b --prefill 20x2x8 --decode 20x1x8 --busy 0.4 --time 24h --placement router "
    "--scale none,load,busy",
    description="""Conversations of several turns arrive at a cluster of rings. A hardware profile predicts durations;
the placement code of the service decides. Placements: `router` is that of the service; `least_loaded` and `round_robin`
ignore KV; `kv_aware` weighs exact queues against the KV that rings hold. Pools are RINGSxCPxTP. A seed fixes the
conversations; most of them begin in the middle of the time. With --scale, rings are stopped while fewer are enough, and
started again later. `load` is the rule of `min_rings`. `busy` is the rule of Kubernetes' HPA, with the share of time in
which rings compute. The table shows the hours that prefill rings and decode rings were on.""",
)
def simulate(options: SimulateOptions) -> int:
    if options.plot is not None:
        require_matplotlib()
    cluster = _cluster(options)
    trace = _trace(options, cluster)
    if options.write_trace is not None:
        try:
            with options.write_trace.open("w", encoding="utf-8") as file:
                file.writelines(format_trace(trace))
        except OSError as error:
            raise ConfigError(f"--write-trace: cannot write {options.write_trace}: {error}") from error
    results = _simulated(cluster, trace, _runs(options), options.jobs)
    if options.plot is not None:
        write_simulation_plot(results, options.plot)
    if options.json:
        print(json.dumps({"results": [asdict(result) for result in results]}))
    else:
        out = console(pipe_width=PIPE_WIDTH)
        print_table(out, _table(results))
        print_table(out, _size_table(results), num_keys=2)
        if isinstance(trace, list) and any(each.block_ids for each in trace):
            print_lines(_bounds(trace, cluster.kv_tokens))
        print_lines(
            f"{results[0].num_turns} turns of {len(trace)} conversations; TTFT counts from the first attempt at a turn"
        )
    return 0


Run = tuple[str, ScalingShape]
"""A placement, and how the rings scale."""


def _runs(options: SimulateOptions) -> list[Run]:
    """Return the runs to compare. Raises ConfigError for an unknown placement or way to scale."""
    placements, ways = (list(dict.fromkeys(text.split(","))) for text in (options.placement, options.scale))
    for placement in placements:
        if placement not in POLICIES:
            raise ConfigError(f"--placement: {placement!r} is unknown; allowed are {', '.join(POLICIES)}")
    for way in ways:
        if way not in WAYS:
            raise ConfigError(f"--scale: {way!r} is unknown; allowed are {', '.join(WAYS)}")
    if not 0.0 < options.target <= 1.0:
        raise ConfigError(f"--target: {options.target} is no share; allowed are numbers above 0 and up to 1")
    settings = ScalingSettings(busy_share=options.target, max_wait=parse_seconds("--max-wait", options.max_wait))
    shapes = [
        ScalingShape(
            way=way,
            least=options.least,
            start_seconds=parse_seconds("--ring-start", options.ring_start),
            settings=settings,
        )
        for way in ways
    ]
    return [(placement, shape) for placement in placements for shape in shapes]


def _simulated(cluster: ClusterShape, trace: Trace, runs: Sequence[Run], jobs: int) -> list[SimulationResult]:
    """Simulate every run."""
    with bar() as progress:
        if jobs > 1:
            task = progress.add_task("placements", total=len(runs))
            # Not by fork: a process that has used gRPC has threads that its child lacks, and a garbage collection in
            # the child would wait for them for ever.
            with ProcessPoolExecutor(max_workers=jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                done = pool.map(partial(_simulate, cluster, trace), runs)
                return list(progress.track(done, task_id=task))
        results = []
        for run in runs:
            task = progress.add_task(f"conversations, {_title(run[0], run[1].way)}", total=len(trace))
            results.append(_simulate(cluster, trace, run, partial(progress.advance, task)))
        return results


def _simulate(
    cluster: ClusterShape, trace: Trace, run: Run, tell: Callable[[], None] = lambda: None
) -> SimulationResult:
    placement, scaling = run
    return Simulation(cluster, trace, placement, scaling=scaling).run(tell)


def _title(placement: str, way: str) -> str:
    """Name a run."""
    return placement if way == "none" else f"{placement}, by {way}"


def _cluster(options: SimulateOptions) -> ClusterShape:
    model = planned_model(options.model)
    prefill, decode = _pool("--prefill", options.prefill), _pool("--decode", options.decode)
    for pool in (prefill, decode):
        require_tp(model, pool.tp)
    return ClusterShape(
        model=to_model_info(model),
        weights=model.weights,
        profile=read_profile(options.hardware),
        prefill=prefill,
        decode=decode,
        kv_tokens=parse_tokens("--kv-tokens", options.kv_tokens) if options.kv_tokens else 0,
        chunk_tokens=parse_tokens("--chunk", options.chunk),
        max_batch=options.max_batch,
    )


def _trace(options: SimulateOptions, cluster: ClusterShape) -> Trace:
    if options.trace is not None:
        return read_trace(options.trace)
    shape = TraceShape(
        num_conversations=options.conversations or 1000,
        seconds=parse_seconds("--time", options.time),
        first=tuple(_first(item) for item in options.first.split(",")),
        mean_turns=options.turns,
        mean_output_tokens=parse_tokens("--answer", options.answer),
    )
    if options.busy is not None:
        if not 0.0 < options.busy <= 1.0:
            raise ConfigError(f"--busy: {options.busy} is no share; allowed are numbers above 0 and up to 1")
        shape = replace(shape, num_conversations=conversations_for(options.busy, cluster, shape, options.seed))
    return SyntheticTrace(shape, options.seed)


def _first(item: str) -> FirstPrompts:
    sizes, colon, weight = item.partition(":")
    least, dash, most = sizes.partition("-")
    kind = around(parse_tokens("--first", least))
    if dash:
        kind = FirstPrompts(least=parse_tokens("--first", least), most=parse_tokens("--first", most))
        if kind.least > kind.most:
            raise ConfigError(f"--first: {sizes!r} ends before it begins; allowed are ranges like 8k-128k")
    if not colon:
        return kind
    if re.fullmatch(r"\d*\.?\d+", weight) is None or not float(weight):
        raise ConfigError(f"--first: {item!r} has no weight after the colon; allowed are those like 8k-128k:45")
    return replace(kind, weight=float(weight))


def _pool(key: str, text: str) -> PoolShape:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,3})x([1-9]\d{0,2})", text)
    if found is None:
        raise ConfigError(f"{key}: {text!r} is no pool; allowed are those like 20x2x8, rings x cp x tp")
    rings, cp, tp = map(int, found.groups())
    return PoolShape(num_rings=rings, cp=cp, tp=tp)


def _bounds(trace: Sequence[TracedConversation], room: int) -> str:
    """Describe the share that one cache for all rings would have served: an upper bound of every placement."""
    unlimited = f"one cache for all rings would serve {ideal_share(trace):.1%} of the prompt tokens without a limit"
    return f"{unlimited}, {ideal_share(trace, room):.1%} in {room} tokens (LRU)" if room else unlimited


def _table(results: Sequence[SimulationResult]) -> Table:
    times = ("TTFT p50", "p90", "p95", "p99", "mean", "queue p50", "p99", "TTIT")
    shares = ("cached", "moved", "recomputed", "pass-Q", "busy", "busiest", "batches")
    table = simple_table("placement", *times, *shares, "asked again", "ring hours", left_aligned=("placement",))
    for each in results:
        ttft, queue = each.ttft, each.queue
        seconds = (ttft.p50, ttft.p90, ttft.p95, ttft.p99, ttft.mean, queue.p50, queue.p99)
        tokens = (each.moved_tokens / each.prompt_tokens, each.recomputed_tokens / each.prompt_tokens)
        parts = (each.cached_share, *tokens, each.pass_q_share, each.busy_share, each.busiest_share, each.batch_share)
        cells = [*map(format_seconds, (*seconds, each.ttit_mean)), *(f"{part:.1%}" for part in parts)]
        hours = f"{each.prefill_ring_seconds / 3600:.1f} + {each.decode_ring_seconds / 3600:.1f}"
        table.add_row(_title(each.placement, each.scaling), *cells, str(each.num_retries), hours)
    return table


def _size_table(results: Sequence[SimulationResult]) -> Table:
    headers = ("placement", "new tokens", "turns", "TTFT p50", "p90", "p99", "most")
    table = simple_table(*headers, left_aligned=headers[:2])
    for each in results:
        for name, times in each.ttft_of_size.items():
            if times.count:
                cells = map(format_seconds, (times.p50, times.p90, times.p99, times.most))
                table.add_row(_title(each.placement, each.scaling), name, str(times.count), *cells)
    return table

"""`ringserve bench`: open-loop load on a whole service, already running or started for the measurement."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
from rich.table import Table
from typer import BadParameter

from ringserve.client import Client
from ringserve.cp_core.errors import ConfigError, Unavailable
from ringserve.services.cli.command import argument, command, option
from ringserve.services.cli.options import JsonFlag, PlotFile, ServingOptions
from ringserve.services.offline.load.alike import count_differing, expected_shares, read_requests, scaled
from ringserve.services.offline.load.replay import (
    KINDS,
    Arrival,
    Outcome,
    RequestKind,
    draw_trace,
    read_trace,
    replay,
    write_trace,
)
from ringserve.services.offline.load.summary import (
    FIRST_TURNS,
    Bounds,
    LoadReport,
    summarize,
    write_load_plot,
)
from ringserve.services.offline.reports import Summary, load_now, require_matplotlib
from ringserve.services.offline.terminal import console, print_table, progress_bar, simple_table
from ringserve.workers.model.builtin import resolve_model_path

PIPE_WIDTH = 120
MAX_DIVIDE = 512
"""Largest --divide: a block of Mooncake's traces has 512 tokens, of which one must remain."""


def _positive(text: str) -> float:
    """Parse a number above 0. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError("is not allowed; give a number above 0")
    return value


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    load: str = argument("", default="", hidden=True)  # `bench load` is its other name
    rate: float = option("requests a second", "N", 1.0, parser=_positive)
    duration: float = option("time of arrivals", "SECONDS", 60.0, parser=_positive)
    mix: str = option("weights of the kinds that arrive at random", "KIND:WEIGHT,...", "short:1")
    every: str = option("besides, one request of KIND every SECONDS", "KIND:SECONDS", "")
    kind: list[str] = option(
        "another kind; repeatable (default: "
        + " ".join(f"{kind.name}={kind.least_prompt}-{kind.most_prompt}:{kind.max_tokens}" for kind in KINDS)
        + ")",
        "NAME=TOKENS:ANSWER",
        [],
    )
    trace: Path | None = option("arrivals from a file of JSON lines, not at random", default=None)
    divide: int = option("read a Mooncake --trace and divide its lengths by N, 1 to 512", default=0, show_default=False)
    requests: int = option("with --divide: take the first N requests", default=100)
    pace: float = option("with --divide: multiply arrival times by X; 2 halves the rate", default=1.0, parser=_positive)
    check: int = option("with --divide: compare N answers with transformers", default=0, show_default=False)
    save_trace: Path | None = option("write the arrivals that were drawn", default=None)
    ttft_bound: float = option("longest TTFT of a good request", "SECONDS", 2.0, parser=_positive)
    ttit_bound: float = option("longest mean TTIT of a good request", "SECONDS", 0.1, parser=_positive)
    timeout: float = option("deadline of each request", "SECONDS", 300.0, parser=_positive)
    seed: int = option("seed of arrivals and prompts", default=0)
    service: ServingOptions
    json: JsonFlag = False
    plot: PlotFile = None

    def __post_init__(self) -> None:
        if self.load not in ("", "load"):
            raise BadParameter(f"{self.load}: there is no such bench; 'ringserve bench --help' shows the options")


@command(
    "ringserve bench --rate 2 --duration 60 --mix short:0.8,long:0.2",
    "ringserve bench --start --rate 4 --duration 60 --mix short:1 --every long:10 --plot load.png",
    "ringserve bench --target 127.0.0.1:50051 --trace requests.jsonl --json",
    "ringserve bench --start --trace examples/traces/conversation_trace.jsonl.gz --divide 64 --requests 60 --check 10",
    description="""Requests arrive at random at a rate (Poisson), whatever the state of earlier ones, and with --every
also at fixed intervals. A kind is NAME=PROMPT:ANSWER or NAME=LEAST-MOST:ANSWER, with lengths in tokens.""",
)
def bench(options: BenchOptions) -> int:
    if options.plot is not None:
        require_matplotlib()
    trace = _trace(options)
    bounds = Bounds(ttft=options.ttft_bound, ttit=options.ttit_bound)
    before = load_now()
    with options.service.serving() as target, progress_bar(len(trace), "requests") as tell:
        try:
            outcomes = asyncio.run(
                replay(
                    target, trace, options.timeout, options.seed, lambda status: tell(f"requests, the latest {status}")
                )
            )
        except grpc.aio.AioRpcError as failure:
            raise Unavailable(f"{target} does not answer: {failure.details()}") from None
        shares = _expected(options, target) if options.divide else ()
    report = summarize(outcomes, bounds, _settings(options), (before, load_now()))
    if options.divide:
        report = replace(report, notes=(*report.notes, *_cached_lines(options, report, outcomes, *shares)))
    if options.plot is not None:
        write_load_plot(report, outcomes, options.plot)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), _table(report))
        print(*_closing_lines(report), *report.notes, sep="\n")
    return 0 if any(outcome.status == "ok" for outcome in outcomes) else 1


def _expected(options: BenchOptions, target: str) -> tuple[float, float, str]:
    """Return the cached shares of simulated rings and of one cache, and the path of the service's model."""
    assert options.trace is not None, "--divide needs it"
    with Client(target) as client:
        rings, model = client.server_info().rings, client.model_info().model_path
    return *expected_shares(read_requests(options.trace, options.requests), rings, options.divide), model


def _cached_lines(
    options: BenchOptions,
    report: LoadReport,
    outcomes: Sequence[Outcome],
    simulated: float,
    ideal: float,
    model: str,
) -> tuple[str, ...]:
    said = (
        f"{report.cached_share:.1%} of the prompt tokens were cached; simulated rings reach {simulated:.1%}, one "
        f"LRU cache as large as all rings of one role {ideal:.1%}"
    )
    if not options.check:
        return (said,)
    num_checked, num_differing = count_differing(outcomes, resolve_model_path(model), options.check)
    return said, f"{num_checked} answers compared with transformers, {num_differing} differ"


def _trace(options: BenchOptions) -> list[Arrival]:
    if options.divide:
        if options.trace is None or not 1 <= options.divide <= MAX_DIVIDE or options.requests < 1:
            raise ConfigError(
                f"--divide: {options.divide} needs --trace, a divisor of 1 to {MAX_DIVIDE}, and --requests of 1 or more"
            )
        return scaled(read_requests(options.trace, options.requests), options.divide, options.pace)
    if options.trace is not None:
        return read_trace(options.trace)
    kinds = {kind.name: kind for kind in (*KINDS, *map(_kind, options.kind))}
    mix, every = _numbers("--mix", options.mix, kinds), _numbers("--every", options.every, kinds)
    if not mix:
        raise ConfigError("--mix: names no kind; write it as short:0.8,long:0.2")
    trace = draw_trace(
        kinds=kinds, rate=options.rate, duration=options.duration, mix=mix, every=every, seed=options.seed
    )
    if not trace:
        raise ConfigError(
            f"--duration: no request arrives in {options.duration:g} s; give a longer one or a higher --rate"
        )
    if options.save_trace is not None:
        write_trace(options.save_trace, trace)
    return trace


def _settings(options: BenchOptions) -> str:
    if options.trace is not None:
        return f"arrivals of {options.trace}"
    every = f", plus {options.every} s" if options.every else ""
    return f"{options.rate:g} requests/s for {options.duration:g} s, {options.mix}{every}, seed {options.seed}"


def _table(report: LoadReport) -> Table:
    headers = ("kind", "requests", "ended", "what", "p50 ms", "p90 ms", "p99 ms", "most", "good")
    table = simple_table(*headers, left_aligned=("kind", "ended", "what"), title=f"load: {report.settings}")
    for kind in report.kinds:
        ended = ", ".join(f"{count} {status}" for status, count in sorted(kind.statuses.items()))
        for number, (name, figures) in enumerate((("TTFT", kind.ttft), ("TTIT", kind.ttit), ("queue", kind.queue))):
            lead = ("", "", "") if number else (kind.kind, str(kind.requests), ended)
            table.add_row(*lead, name, *_milliseconds(figures), "" if number else f"{kind.good:.0%}")
    return table


def _milliseconds(figures: Summary) -> list[str]:
    return [f"{value * 1e3:.1f}" for value in (figures.p50, figures.p90, figures.p99, figures.most)]


def _closing_lines(report: LoadReport) -> list[str]:
    lag = max(kind.lag.p99 for kind in report.kinds)
    before, after = report.load
    return [
        f"{report.requests_per_second:.2f} requests/s, {report.prompt_tokens_per_second:.0f} prompt tokens/s, "
        f"{report.completion_tokens_per_second:.1f} tokens/s of answers over {report.seconds:.1f} s",
        f"goodput {report.good_requests_per_second:.2f} requests/s within TTFT {report.bounds.ttft:g} s "
        f"and TTIT {report.bounds.ttit:g} s on average",
        *_prediction_line(report),
        f"requests were sent {lag * 1e3:.1f} ms late at p99; machine load {before:.1f} before and {after:.1f} after",
    ]


def _prediction_line(report: LoadReport) -> list[str]:
    errors = report.predictions
    if errors is None:
        return []
    later = "" if errors.later is None else f" and {errors.later:.0%} in the later ones"
    return [
        f"predicted prefill seconds differ from measured ones by {errors.first:.0%} in the first {FIRST_TURNS} turns"
        f"{later} (medians)"
    ]


def _numbers(option: str, text: str, kinds: dict[str, RequestKind]) -> dict[str, float]:
    """Parse `name:number` pairs, separated by commas. Raises ConfigError."""
    numbers = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition(":")
        if name not in kinds:
            raise ConfigError(f"{option}: {name!r} is no kind; allowed are {', '.join(kinds)}, more with --kind")
        try:
            numbers[name] = _positive(number)
        except ValueError as error:
            raise ConfigError(f"{option}: {part!r} is not NAME:NUMBER: {number!r} {error}") from None
    return numbers


def _kind(text: str) -> RequestKind:
    """Parse a kind of request. Raises ConfigError."""
    name, _, sizes = text.partition("=")
    prompt, _, answer = sizes.partition(":")
    least, dash, most = prompt.partition("-")
    try:
        kind = RequestKind(
            name=name, least_prompt=int(least), most_prompt=int(most if dash else least), max_tokens=int(answer)
        )
    except ValueError:
        raise ConfigError(f"--kind: {text!r} is not NAME=TOKENS:ANSWER, e.g. short=64-192:32") from None
    if not name or not 1 <= kind.least_prompt <= kind.most_prompt or kind.max_tokens < 1:
        raise ConfigError(f"--kind: {text!r} needs a name, LEAST-MOST tokens of 1 or more, and 1 or more answer tokens")
    return kind

"""`ringserve bench`: measure a service, or rings of processes beside reference implementations in the same run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from cp_core.errors import ConfigError
from cp_core.transport.ring_backend import SERVING
from services.cli import bench_load, bench_router, bench_selection
from services.cli.options import Subcommands
from services.offline.bench.report import (
    Report,
    closing_lines,
    load_now,
    require_matplotlib,
    to_json,
    to_table,
    with_load,
    write_plot,
)
from services.offline.terminal import Tell, console, progress_bar
from workers.protocol.prefill_steps import RING_ALGORITHMS, Algorithm

EXAMPLE = """example:
  ringserve bench attention --tokens 4096,16384
  ringserve bench prefill --ranks 1,2 --tokens 4096,16384 --plot prefill.png
  ringserve bench decode --context 2048,16384,65536 --ranks 1,2 --batch 1,8 --json
"""
HELP = """All contenders of a run alternate, round after round; figures are medians with least and most.
Ratios are medians over the rounds. Targets hold for 2 otherwise idle cores."""
DECODE_HELP = """Time between tokens. The KV of the contexts is random numbers, written directly: nothing is prefilled.
With --layers the weights are random too. The cost of a step depends on neither."""
DECODE_LAYERS = 16
LEAST_STEPS = 4
PIPE_WIDTH = 120
RING_TRANSPORTS = ("auto", *SERVING["cpu"])


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "bench", help="measure", description=HELP, epilog=EXAMPLE, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")

    attention = _add_kind(kinds, "attention", "one layer's attention by ring size, beside torch's own ring attention")
    attention.add_argument("--tokens", type=_counts, default=[4096, 16384], help="(default: 4096,16384)")
    attention.add_argument(
        "--cached",
        type=int,
        default=0,
        help="cached tokens before the new ones; measures ringserve's rings alone (default: 0)",
    )
    for name, default in (("--heads", 8), ("--kv-heads", 2), ("--head-dim", 64)):
        attention.add_argument(name, type=_count, default=default, help=f"(default: {default})")
    attention.set_defaults(run=run_attention)

    prefill = _add_kind(kinds, "prefill", "time to first token of a whole model by ring size, beside transformers")
    prefill.add_argument("--tokens", type=_counts, default=[4096, 16384], help="(default: 4096,16384)")
    prefill.add_argument(
        "--algorithm", choices=[each.value for each in RING_ALGORITHMS], default=Algorithm.PASS_KV.value
    )
    _add_model_option(prefill)
    prefill.set_defaults(run=run_prefill)

    decode = _add_kind(kinds, "decode", "time between tokens by context, ring size and batch", DECODE_HELP)
    decode.add_argument("--context", type=_counts, default=[2048, 16384, 65536], help="(default: 2048,16384,65536)")
    decode.add_argument("--batch", type=_counts, default=[1, 8], help="sequences a step (default: 1,8)")
    decode.add_argument("--steps", type=_count, default=8, help="tokens a measurement (default: 8)")
    _add_model_option(decode)
    decode.add_argument(
        "--layers",
        type=int,
        default=DECODE_LAYERS,
        help=f"layers of the model, 0 for its own (default: {DECODE_LAYERS})",
    )
    decode.set_defaults(run=run_decode)

    bench_load.add(kinds)
    bench_router.add(kinds)
    bench_selection.add(kinds)


def run_attention(options: argparse.Namespace) -> int:
    from services.offline.bench.attention import AttentionShape, measure_attention, num_measurements

    heads, kv_heads = options.heads, options.kv_heads
    if heads % kv_heads:
        raise ConfigError(f"--heads: {heads} is no multiple of the {kv_heads} KV heads")
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=options.head_dim)
    if options.cached < 0:
        raise ConfigError(f"--cached: {options.cached} is negative; allowed are 0 or more")
    ranks, tokens, rounds, cached = options.ranks, options.tokens, options.rounds, options.cached
    return _run(
        options,
        num_measurements(ranks, tokens, rounds, cached),
        lambda tell: measure_attention(shape, ranks, tokens, rounds, cached, options.transport, tell),
    )


def run_prefill(options: argparse.Namespace) -> int:
    from services.offline.bench.prefill import measure_prefill, num_measurements

    total = num_measurements(options.ranks, options.tokens, options.rounds)
    algorithm = Algorithm(options.algorithm)
    return _run(
        options,
        total,
        lambda tell: measure_prefill(
            options.model, options.ranks, options.tokens, options.rounds, algorithm, options.transport, tell
        ),
    )


def run_decode(options: argparse.Namespace) -> int:
    from services.offline.bench.decode import DecodeCase, measure_decode, num_measurements

    if options.steps < LEAST_STEPS:
        raise ConfigError(f"--steps: {options.steps} is too few; allowed are {LEAST_STEPS} or more")
    if options.layers < 0:
        raise ConfigError(f"--layers: {options.layers} is negative; allowed are 0 or more")
    cases = [DecodeCase(context, batch, options.steps) for context in options.context for batch in options.batch]
    total = num_measurements(options.ranks, cases, options.rounds)
    layers = options.layers or None
    return _run(
        options,
        total,
        lambda tell: measure_decode(
            options.model, layers, options.ranks, cases, options.rounds, options.transport, tell
        ),
    )


def _run(options: argparse.Namespace, total: int, measure: Callable[[Tell], Report]) -> int:
    if options.plot is not None:
        require_matplotlib()
    before = load_now()
    with progress_bar(total) as tell:
        report = measure(tell)
    report = with_load(report, before)
    if options.plot is not None:
        write_plot(report, options.plot)
    if options.json:
        print(to_json(report))
    else:
        console(pipe_width=PIPE_WIDTH).print(to_table(report))
        print(*closing_lines(report), sep="\n")
    return 0


def _add_kind(kinds: Subcommands, name: str, summary: str, description: str | None = None) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name, help=summary, description=description or summary, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=_counts, default=[1, 2], help="ring sizes (default: 1,2)")
    parser.add_argument("--rounds", type=_count, default=5, help="measurements of each contender (default: 5)")
    parser.add_argument(
        "--transport",
        choices=RING_TRANSPORTS,
        default=RING_TRANSPORTS[0],
        help="transport of the rings' messages (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the figures; needs matplotlib, the extra `plot`"
    )
    return parser


def _add_model_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="builtin:tiny", metavar="DIR", help="model directory (default: builtin:tiny)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; allowed are integers of 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    """Parse distinct counts, separated by commas."""
    return list(dict.fromkeys(map(_count, text.split(","))))

"""`python -m bench attention|prefill|decode`: rings or a service, beside reference implementations in the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from bench.options import Subcommands, add_config_options, config_of
from bench.report import Report, table
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.transport.ring_backend import SERVING
from ringserve.services.cli.import_model import prepare
from ringserve.services.offline.reports import load_now, require_matplotlib
from ringserve.services.offline.terminal import Tell, console, print_table, progress_bar
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from bench.rings.attention import AttentionShape

EXAMPLE = """example:
  python -m bench attention --tokens 4096,16384
  python -m bench attention --device cuda
  python -m bench attention --device cpu --heads 9 --kv-heads 3
  python -m bench prefill --model DIR --rounds 3
  python -m bench prefill --rings-only --ranks 1,2 --tokens 4096,16384 --plot prefill.png
  python -m bench prefill --rings-only --ranks 2,4 --tp 2,4 --tokens 4096
  python -m bench decode --rings-only --context 2048,16384,65536 --ranks 1,2 --batch 1,8 --json
"""
HELP = """All contenders of a run alternate, round after round; figures are medians with least and most.
Ratios are medians over the rounds. Targets hold for 2 otherwise idle cores."""
SERVED_HELP = """A service is started, with rings of --ranks for prefill and for decode. One request at a time goes
through gateway, router and rings, beside stock transformers with a thread for every core.
With --rings-only, bare rings of processes are measured without a service."""
PREFILL_HELP = f"""Time to first token of random prompts.
{SERVED_HELP}"""
DECODE_HELP = f"""Time between tokens of one stream, in conversations of --context tokens that grow by a turn a round.
{SERVED_HELP}
The KV of bare rings is random numbers, written directly: nothing is prefilled. With --layers their weights are random
too. The cost of a step depends on neither."""
DECODE_LAYERS = 16
LEAST_STEPS = 4
# Default sizes of the whole service, then of bare rings.
SERVED_TOKENS, SERVED_RANKS, SERVED_STEPS = [512, 2048, 6000], [2], 24
RING_TOKENS, RING_CONTEXTS, RING_SIZES = [4096, 16384], [2048, 16384, 65536], [1, 2]
RING_STEPS, RING_BATCHES = 8, [1, 8]
PIPE_WIDTH = 120
RING_TRANSPORTS = ("auto", *SERVING["cpu"])


def add(commands: Subcommands) -> None:
    attention = _add_kind(
        commands, "attention", "one layer's attention by ring size, beside torch's own ring attention"
    )
    attention.add_argument("--tokens", type=_counts, default=[4096, 16384], help="(default: 4096,16384)")
    attention.add_argument(
        "--cached",
        type=int,
        default=0,
        help="cached tokens before the new ones; then only ringserve's rings are measured (default: 0)",
    )
    attention.add_argument(
        "--window",
        type=int,
        default=0,
        help="sliding window in tokens with which ringserve's rings are measured beside those without (default: none)",
    )
    for name, default, of_device in (("--heads", 8, 32), ("--kv-heads", 2, 8), ("--head-dim", 64, 128)):
        attention.add_argument(name, type=_count, help=f"(default: {default}; with --device cuda {of_device})")
    attention.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        help="measure the kernels of this device in one process instead of rings: prefill, decode, linear layers on "
        "CPUs, merge, sampling",
    )
    attention.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="with --device: type of queries, KV and weights (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    attention.set_defaults(run=run_attention)

    prefill = _add_kind(commands, "prefill", "time to first token, beside transformers", PREFILL_HELP, ranks=None)
    prefill.add_argument(
        "--tokens", type=_counts, help=f"(default: {_listed(SERVED_TOKENS)}; of bare rings {_listed(RING_TOKENS)})"
    )
    prefill.add_argument(
        "--algorithm", choices=[each.value for each in RING_ALGORITHMS], help="of bare rings (default: pass_kv)"
    )
    prefill.add_argument(
        "--tp",
        type=_counts,
        metavar="N,...",
        help="processes that share the weights, beside rings (default: none)",
    )
    _add_served_options(prefill)
    prefill.set_defaults(run=run_prefill)

    decode = _add_kind(commands, "decode", "time between tokens, beside transformers", DECODE_HELP, ranks=None)
    decode.add_argument(
        "--context", type=_counts, help=f"(default: {_listed(SERVED_TOKENS)}; of bare rings {_listed(RING_CONTEXTS)})"
    )
    decode.add_argument(
        "--steps",
        type=_count,
        help=f"tokens a measurement (default: {SERVED_STEPS}; of bare rings {RING_STEPS})",
    )
    decode.add_argument("--batch", type=_counts, help="sequences a step of bare rings (default: 1,8)")
    decode.add_argument(
        "--short",
        type=_count,
        metavar="TOKENS",
        help="tokens of all sequences of a batch but one, measured spread over the ranks and whole on one rank each "
        "(default: --context)",
    )
    decode.add_argument(
        "--layers", type=int, help=f"layers of the model of bare rings, 0 for its own (default: {DECODE_LAYERS})"
    )
    _add_served_options(decode)
    decode.set_defaults(run=run_decode)


def run_attention(options: argparse.Namespace) -> int:
    from bench.rings.attention import AttentionShape, measure_attention, num_measurements

    defaults = (8, 2, 64) if options.device != "cuda" else (32, 8, 128)
    given = (options.heads, options.kv_heads, options.head_dim)
    heads, kv_heads, head_dim = (value or default for value, default in zip(given, defaults, strict=True))
    if heads % kv_heads:
        raise ConfigError(f"--heads: {heads} is no multiple of the {kv_heads} KV heads")
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    if options.device is not None:
        return _run_kernels(options, shape)
    _refuse(options, ("dtype",), "needs --device; rings are measured in float32")
    if options.cached < 0:
        raise ConfigError(f"--cached: {options.cached} is negative; allowed are 0 or more")
    if options.window < 0:
        raise ConfigError(f"--window: {options.window} is negative; allowed are 0 or more")
    ranks, tokens, rounds, cached, window = (
        options.ranks,
        options.tokens,
        options.rounds,
        options.cached,
        options.window,
    )
    return _run(
        options,
        num_measurements(ranks, tokens, rounds, cached, window),
        lambda tell: measure_attention(shape, ranks, tokens, rounds, cached, _transport(options), tell, window),
    )


def _run_kernels(options: argparse.Namespace, shape: AttentionShape) -> int:
    import torch

    from bench.rings.kernels import CPU_SIZES, GPU_SIZES, NUM_KINDS, measure_kernels

    _refuse(options, ("transport", "plot"), "not with --device, which measures no rings")
    is_gpu = options.device == "cuda"
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    chosen = options.dtype or ("bfloat16" if is_gpu else "float32")
    dtype, sizes = getattr(torch, chosen), GPU_SIZES if is_gpu else CPU_SIZES
    with progress_bar(NUM_KINDS) as tell:
        rows = measure_kernels(shape, device, dtype, sizes, options.rounds, tell)
    if options.json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        print_table(console(pipe_width=PIPE_WIDTH), table([row.cells() for row in rows]), num_keys=3)
    return 0


def run_prefill(options: argparse.Namespace) -> int:
    if not options.rings_only:
        _refuse(options, ("algorithm", "transport", "tp"), "needs --rings-only; a service chooses by its configuration")
        return _run_served_prefill(options)
    from bench.rings.prefill import measure_prefill, num_measurements

    _refuse(options, ("config", "set"), "not with --rings-only, which starts no service")
    ranks, tokens = options.ranks or RING_SIZES, options.tokens or RING_TOKENS
    algorithm, tensor_ranks = Algorithm(options.algorithm or Algorithm.PASS_KV), options.tp or []
    return _run(
        options,
        num_measurements(ranks, tokens, options.rounds, tensor_ranks),
        lambda tell: measure_prefill(
            options.model, ranks, tokens, options.rounds, algorithm, _transport(options), tell, tensor_ranks
        ),
    )


def _run_served_prefill(options: argparse.Namespace) -> int:
    from bench.service.served import measure_served_prefill, num_measurements

    ranks, tokens, rounds = options.ranks or SERVED_RANKS, options.tokens or SERVED_TOKENS, options.rounds
    config = config_of(options)
    return _run(
        options,
        num_measurements(ranks, tokens, rounds),
        lambda tell: measure_served_prefill(options.model, config, ranks, tokens, rounds, tell),
    )


def run_decode(options: argparse.Namespace) -> int:
    if options.steps is not None and options.steps < LEAST_STEPS:
        raise ConfigError(f"--steps: {options.steps} is too few; allowed are {LEAST_STEPS} or more")
    if not options.rings_only:
        _refuse(options, ("batch", "layers", "transport", "short"), "needs --rings-only; a service runs one stream")
        return _run_served_decode(options)
    from bench.rings.decode import DecodeCase, measure_decode, num_measurements

    _refuse(options, ("config", "set"), "not with --rings-only, which starts no service")
    layers = DECODE_LAYERS if options.layers is None else options.layers
    if layers < 0:
        raise ConfigError(f"--layers: {layers} is negative; allowed are 0 or more")
    ranks, steps = options.ranks or RING_SIZES, options.steps or RING_STEPS
    contexts, batches = options.context or RING_CONTEXTS, options.batch or RING_BATCHES
    cases = [DecodeCase(context, batch, steps, options.short or 0) for context in contexts for batch in batches]
    return _run(
        options,
        num_measurements(ranks, cases, options.rounds),
        lambda tell: measure_decode(
            options.model, layers or None, ranks, cases, options.rounds, _transport(options), tell
        ),
    )


def _run_served_decode(options: argparse.Namespace) -> int:
    from bench.service.served import measure_served_decode, num_measurements

    ranks, contexts, rounds = options.ranks or SERVED_RANKS, options.context or SERVED_TOKENS, options.rounds
    config, steps = config_of(options), options.steps or SERVED_STEPS
    return _run(
        options,
        num_measurements(ranks, contexts, rounds),
        lambda tell: measure_served_decode(options.model, config, ranks, contexts, steps, rounds, tell),
    )


def _transport(options: argparse.Namespace) -> str:
    return str(options.transport or RING_TRANSPORTS[0])


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these options is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: {why}")


def _run(options: argparse.Namespace, total: int, measure: Callable[[Tell], Report]) -> int:
    if options.plot is not None:
        require_matplotlib()
    if "model" in vars(options):
        prepare(options.model, Console(stderr=True))
    before = load_now()
    with progress_bar(total) as tell:
        report = measure(tell)
    report = replace(report, load=(before, load_now()))
    if options.plot is not None:
        report.plot(options.plot)
    if options.json:
        print(report.json())
    else:
        print_table(console(pipe_width=PIPE_WIDTH), report.table())
        print(*report.lines(), sep="\n")
    return 0


def _add_kind(
    kinds: Subcommands,
    name: str,
    summary: str,
    description: str | None = None,
    ranks: Sequence[int] | None = RING_SIZES,
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=summary,
        description=f"{description or summary}\n{HELP}",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    default = _listed(ranks) if ranks else f"{_listed(SERVED_RANKS)}; of bare rings {_listed(RING_SIZES)}"
    parser.add_argument("--ranks", type=_counts, default=ranks, help=f"ring sizes (default: {default})")
    parser.add_argument("--rounds", type=_count, default=5, help="measurements of each contender (default: 5)")
    parser.add_argument(
        "--transport",
        choices=RING_TRANSPORTS,
        help="transport of the messages of bare rings (default: auto)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw the figures; needs matplotlib, the extra `plot`"
    )
    return parser


def _add_served_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="builtin:tiny", metavar="DIR", help="directory or built-in model (default: builtin:tiny)"
    )
    parser.add_argument("--rings-only", action="store_true", help="measure bare rings of processes, not a service")
    add_config_options(parser)


def _listed(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; allowed are integers of 1 or more")
    return int(text)


def _counts(text: str) -> list[int]:
    """Parse distinct counts, separated by commas."""
    return list(dict.fromkeys(map(_count, text.split(","))))

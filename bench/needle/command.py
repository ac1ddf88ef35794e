"""`python -m bench needle`: find a code among up to a million tokens, and check the answer in one process."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bench.options import Subcommands
from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster.stopping import StopRequest, StopSignals
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.units import parse_tokens

if TYPE_CHECKING:
    from bench.needle.task import Expected, FoundCode

EXIT_INTERRUPTED = 130
ROUNDING = 1e-5
"""Largest allowed difference of a log-probability: both sides sum the same products in float32, in another order."""


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("needle", description=__doc__, epilog="example: python -m bench needle --tokens 1m")
    parser.add_argument("--tokens", metavar="N", default="65536", help="length of the text (default: 65536)")
    parser.add_argument("--depth", type=float, default=0.3, help="place of the code, 0 to 1 (default: 0.3)")
    parser.add_argument("--json", action="store_true", help="print the answer and the verdict as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo, and return the exit status."""
    # These import Ray, torch and transformers, which slow the start of other commands.
    from bench.needle.model import needle_path
    from bench.needle.task import ask, expected, haystack, needle_config
    from ringserve.services.cluster.local import LocalCluster

    console = Console(stderr=options.json)
    began, depth, num_tokens = time.monotonic(), options.depth, parse_tokens("--tokens", options.tokens)
    config = needle_config(num_tokens)
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"--depth: {depth} is not allowed; allowed are 0 to 1")
    path, text = needle_path(), haystack(num_tokens, depth)
    codec, signals, cluster = TextCodec(path), StopSignals(), None
    try:

        def progress(line: str) -> None:
            console.print(f"[dim]{time.monotonic() - began:6.1f} s  {line}")

        cluster = LocalCluster(config, progress, signals.requested)
        with console.status("starting the cluster"):
            cluster.start()
        with signals.interruptible():
            with console.status(f"reading {num_tokens} tokens"):
                found = ask(cluster.gateway_address, text)
            progress(f"the service answered {found.answer['text']!r} after {found.seconds:.1f} s")
            cluster.stop()
            with console.status("computing the same in one process"):
                right = expected(path, codec.encode(text).tolist(), found.answer["token_ids"])
    except StopRequest:
        console.print("interrupted, stopping")
        return EXIT_INTERRUPTED
    finally:
        if cluster is not None:
            cluster.stop()
    console.print(_table(num_tokens, depth, found))
    return _report(console, found, right, is_json=options.json)


def _report(console: Console, found: FoundCode, right: Expected, *, is_json: bool) -> int:
    from bench.needle.task import ANSWER

    difference = max(abs(own - other) for own, other in zip(found.logprobs, right.logprobs, strict=True))
    is_equal = found.answer["token_ids"] == right.token_ids
    passed = is_equal and difference <= ROUNDING and found.answer["text"] == ANSWER
    console.print(
        f"one process chooses {'the same' if is_equal else f'DIFFERENT tokens: {right.token_ids}'}, in "
        f"{right.seconds:.1f} s; log-probabilities differ by {difference:.1g} at most, smallest lead "
        f"{right.smallest_lead:.2g} logits"
    )
    console.print(f"{'done' if passed else 'FAILED'}; nothing is left running")
    if is_json:
        report = asdict(found) | {"passed": passed, "expected": asdict(right), "difference": difference}
        json.dump(report, sys.stdout)
        print()
    return 0 if passed else 1


def _table(num_tokens: int, depth: float, found: FoundCode) -> Table:
    plan, table = found.answer["plan"], Table("", f"{num_tokens} tokens, the code at {depth:.0%} of them", box=None)
    algorithms = Counter(chunk["algorithm"] for chunk in plan["chunks"])
    table.add_row("answer", found.answer["text"])
    table.add_row("chunks", ", ".join(f"{count} by {name}" for name, count in algorithms.items()))
    table.add_row("predicted prefill", f"{plan['predicted_prefill_seconds']:.1f} s")
    table.add_row("measured prefill", f"{plan['prefill_seconds']:.1f} s")
    table.add_row("TTFT", f"{found.answer['ttft_seconds']:.1f} s")
    table.add_row("TTIT", f"{1000 * found.answer['ttit_seconds']:.1f} ms")
    table.add_row("migrated to decode", f"{plan['migrated_bytes'] / 1e6:.1f} MB")
    for ring, held in found.tokens_per_rank.items():
        table.add_row(f"KV tokens per rank, {ring}", "  ".join(map(str, held)))
    for name, peak in found.peak_bytes.items():
        table.add_row(f"peak memory, {name}", f"{peak / 1e6:.0f} MB")
    return table

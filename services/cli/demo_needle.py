"""`ringserve demo --model builtin:needle`: find a code among up to a million tokens, and check it in one process."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ringserve.cp_core.errors import ConfigError
from ringserve.services.cluster.stopping import StopRequest, StopSignals
from ringserve.services.gateway.text import TextCodec
from ringserve.workers.model.builtin import resolve_model_path

if TYPE_CHECKING:
    from ringserve.services.offline.needle import Expected, FoundCode

EXIT_INTERRUPTED = 130
TOKENS = 65536
ROUNDING = 1e-5
"""Largest allowed difference of a log-probability: both sides sum the same products in float32, in another order."""


def run(console: Console, num_tokens: int, *, depth: float, is_json: bool) -> int:
    """Run the demo with a text of so many tokens, or TOKENS for 0, and return the exit status."""
    # These import Ray, torch and transformers, which slow the start of other commands.
    from ringserve.services.cluster.local import LocalCluster
    from ringserve.services.offline.needle import MODEL, ask, expected, haystack, needle_config

    began, num_tokens = time.monotonic(), num_tokens or TOKENS
    config = needle_config(num_tokens)
    if not 0.0 <= depth <= 1.0:
        raise ConfigError(f"--depth: {depth} is not allowed; allowed are 0 to 1")
    path, text = resolve_model_path(MODEL), haystack(num_tokens, depth)
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
    return _report(console, found, right, is_json=is_json)


def _report(console: Console, found: FoundCode, right: Expected, *, is_json: bool) -> int:
    from ringserve.services.offline.needle import ANSWER

    difference = max(abs(own - other) for own, other in zip(found.logprobs, right.logprobs, strict=True))
    is_equal = found.answer["token_ids"] == right.token_ids and difference <= ROUNDING
    passed = is_equal and found.answer["text"] == ANSWER
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

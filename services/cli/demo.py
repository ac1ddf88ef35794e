"""`ringserve demo`: start a cluster, play a long two-turn conversation, check every token, stop everything."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.options import Subcommands
from services.client import Client
from services.cluster.local import LocalCluster
from services.cluster.stopping import StopRequest, StopSignals
from services.gateway.text import TextCodec
from services.offline.demo import FOLLOW_UP, QUESTION, DemoConversation, DemoTurn, Verdict, check, demo_config, document
from workers.model.builtin import resolve_model_path
from workers.model.info import read_model_info

EXAMPLE = """example:
  ringserve demo
  ringserve demo --tokens 16000 --max-tokens 128 --json
"""
EXIT_INTERRUPTED = 130
FOLLOW_UP_TOOK = {
    "pass_kv": "the follow-up took pass-KV: by the rates of the rings it is no slower than pass-Q here",
    "pass_q": "the follow-up took pass-Q: its queries are few, and keys and values stay in place",
    "decode_ring": "the follow-up was computed by the decode ring, which retains the conversation: no KV moved",
}


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "demo",
        help="run a two-turn conversation and check every token",
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the document, at least (default: 8192)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--json", action="store_true", help="print turns and verdicts as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    console = Console(stderr=options.json)
    began = time.monotonic()

    signals = StopSignals()
    cluster = None
    try:
        config = demo_config()
        path = resolve_model_path(config.model.path)

        def progress(line: str) -> None:
            console.print(f"[dim]{time.monotonic() - began:6.1f} s  {line}")

        cluster = LocalCluster(config, progress, signals.requested)
        with console.status("starting the cluster"):
            cluster.start()
        with signals.interruptible():
            turns = _play(console, cluster.gateway_address, TextCodec(path), options)
            with console.status("checking both answers against transformers on one process"):
                verdicts = check(turns, path, list(read_model_info(path).eos_token_ids))
    except StopRequest:
        console.print("interrupted, stopping")
        return EXIT_INTERRUPTED
    finally:
        if cluster is not None:
            with console.status("stopping the cluster"):
                cluster.stop()
    return _report(console, options, turns, verdicts, time.monotonic() - began)


def _play(console: Console, gateway: str, codec: TextCodec, options: argparse.Namespace) -> list[DemoTurn]:
    turns = []
    with Client(gateway) as client:
        conversation = DemoConversation(client, codec, options.max_tokens)
        texts = (("1: document", document(codec, options.tokens) + QUESTION), ("2: follow-up", FOLLOW_UP))
        for title, text in texts:
            waiting = console.status(f"turn {title}, {len(codec.encode(text))} new tokens: prefilling")
            waiting.start()

            def show(piece: str, waiting: object = waiting) -> None:
                waiting.stop()  # type: ignore[attr-defined]
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True, style="green")

            try:
                turns.append(conversation.ask(title, text, show))
            finally:
                waiting.stop()
            console.print()
    return turns


def _report(
    console: Console, options: argparse.Namespace, turns: list[DemoTurn], verdicts: list[Verdict], seconds: float
) -> int:
    console.print(_table(turns))
    for verdict in verdicts:
        outcome = (
            "equal, token for token" if verdict.is_equal else f"DIFFERENT: transformers answers {verdict.expected}"
        )
        console.print(f"turn {verdict.title}: {outcome} (smallest lead {verdict.smallest_lead:.2g} logits)")
    console.print(FOLLOW_UP_TOOK[turns[-1].answer["plan"]["algorithm"]])
    passed = all(verdict.is_equal for verdict in verdicts)
    console.print(f"{'done' if passed else 'FAILED'} in {seconds:.1f} s; nothing is left running")
    if options.json:
        report = {
            "passed": passed,
            "seconds": seconds,
            "turns": [{"title": turn.title, **turn.answer, "tokens_per_rank": turn.tokens_per_rank} for turn in turns],
            "equal_to_transformers": [verdict.is_equal for verdict in verdicts],
        }
        json.dump(report, sys.stdout)
        print()
    return 0 if passed else 1


def _table(turns: list[DemoTurn]) -> Table:
    """Return a table with a column for each turn."""
    table = Table("", *(turn.title for turn in turns))
    plans = [turn.answer["plan"] for turn in turns]
    table.add_row("new tokens T", *(f"{plan['new_tokens']}" for plan in plans))
    table.add_row("cached tokens P", *(f"{plan['cached_tokens']}" for plan in plans))
    table.add_row("algorithm", *(plan["algorithm"] for plan in plans))
    table.add_row("why", *(plan["reason"] for plan in plans))
    table.add_row("cached from", *(_sources(plan) for plan in plans))
    table.add_row("predicted prefill", *(f"{plan['predicted_prefill_seconds']:.3f} s" for plan in plans))
    table.add_row("measured prefill", *(f"{plan['prefill_seconds']:.3f} s" for plan in plans))
    table.add_row("TTFT", *(f"{turn.answer['ttft_seconds']:.3f} s" for turn in turns))
    table.add_row("TTIT", *(f"{1000 * turn.answer['ttit_seconds']:.1f} ms" for turn in turns))
    table.add_row("migrated to decode", *(f"{plan['migrated_bytes'] / 1e6:.2f} MB" for plan in plans))
    table.add_row("pulled from decode", *(f"{plan['pulled_bytes'] / 1e6:.2f} MB" for plan in plans))
    for ring in turns[-1].tokens_per_rank:
        held = ("  ".join(f"{tokens}" for tokens in turn.tokens_per_rank.get(ring, [])) for turn in turns)
        table.add_row(f"KV tokens per rank, {ring}", *held)
    return table


def _sources(plan: dict[str, Any]) -> str:
    parts = (f"{item['source']} [{item['start']}, {item['stop']})" for item in plan["cached_sources"])
    return "\n".join(parts) or "-"

"""`ringserve demo`: ask a real model about a document, and check every token against transformers.

It starts a cluster of its own, and stops it at the end.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from ringserve.client import Client
from ringserve.cp_core.errors import ModelRefused
from ringserve.services.cli.command import command, flag, one_of, option
from ringserve.services.cli.import_model import prepare
from ringserve.services.cluster.stopping import StopRequest, StopSignals
from ringserve.services.config import DEVICES
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.demo import (
    FIRST,
    FOLLOW_UP,
    FORKED,
    DemoConversation,
    DemoTurn,
    Question,
    Verdict,
    check,
    demo_config,
    document,
    passage,
)
from ringserve.services.offline.units import parse_tokens
from ringserve.workers.model.builtin import PREFIX, SMOLLM2, TINY, has_random_weights, resolve_model_path
from ringserve.workers.model.info import read_model_info

EXIT_INTERRUPTED = 130
RANDOM_TOKENS = 8192
"""Tokens of the document by default with `builtin:tiny`: its tokens are bytes, so the whole document has too many."""
FOLLOW_UP_TOOK = {
    "pass_kv": "the follow-up took pass-KV: by the rates that the rings measured, no other is faster here",
    "pass_q": "the follow-up took pass-Q: its queries are few, and keys and values stay in place",
    "gather_kv": "the follow-up took gather-KV: every rank gets all KV in one exchange, which saves latency",
    "chain": "the follow-up took the chain: keys and values pass once along the ranks, hidden by whole layers",
    "sp_ntp": "the follow-up took SP-NTP: each rank attends a share of the heads, which saves bytes",
    "decode_ring": "the follow-up was computed by the decode ring, which retains the conversation: no KV moved",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    model: str = option(f"model (default: {PREFIX}{SMOLLM2}, or {PREFIX}{TINY} if that cannot be had)", "DIR", "")
    tokens: str = option(
        f"cut the document after so many tokens (default: all of it, {RANDOM_TOKENS} with {PREFIX}{TINY})", "N", ""
    )
    max_tokens: int = option("tokens of each answer, at most", default=64)
    device: str = one_of("device of the ranks; on cuda they share a GPU", DEVICES, "cpu")
    json: bool = flag("print turns and verdicts as one JSON object")


@command("ringserve demo", "ringserve demo --model builtin:tiny --tokens 4000 --json")
def demo(options: DemoOptions) -> int:
    console = Console(stderr=options.json)
    began = time.monotonic()
    num_tokens = parse_tokens("--tokens", options.tokens) if options.tokens else 0
    model = _choose_model(options.model, console)
    path = resolve_model_path(model)
    info, codec = read_model_info(path), TextCodec(path)
    is_random = has_random_weights(model)
    text = document(codec, num_tokens or (RANDOM_TOKENS if is_random else 0))

    signals = StopSignals()
    cluster = None
    try:

        def progress(line: str) -> None:
            console.print(f"[dim]{time.monotonic() - began:6.1f} s  {line}")

        # Here, not above: commands that start no cluster need no Ray, whose import takes longer than all the rest.
        from ringserve.services.cluster.local import LocalCluster

        cluster = LocalCluster(demo_config(model, info.max_positions, options.device), progress, signals.requested)
        with console.status("starting the cluster"):
            cluster.start()
        with signals.interruptible():
            console.print(f"\n{model} reads the log of an invented weather station, {len(codec.encode(text))} tokens")
            turns = _play(console, cluster.gateway_address, codec, text, options.max_tokens)
            with console.status("checking all answers against transformers on one process"):
                verdicts = check(turns, path, info.eos_token_ids, options.max_tokens, "" if is_random else text)
    except StopRequest:
        console.print("interrupted, stopping")
        return EXIT_INTERRUPTED
    finally:
        if cluster is not None:
            with console.status("stopping the cluster"):
                cluster.stop()
    return _report(console, options, turns, verdicts, time.monotonic() - began)


def _choose_model(asked: str, console: Console) -> str:
    """Return the model that was asked for, else the real built-in one, else the random one. Raises ModelRefused."""
    model = asked or PREFIX + SMOLLM2
    try:
        prepare(model, console)
    except ModelRefused as error:
        if asked:
            raise
        console.print(f"{error}; the demo runs {PREFIX}{TINY}, whose answers mean nothing", markup=False)
        return PREFIX + TINY
    return model


def _play(console: Console, gateway: str, codec: TextCodec, text: str, max_tokens: int) -> list[DemoTurn]:
    turns: list[DemoTurn] = []

    def ask(conversation: DemoConversation, question: Question, message: str) -> None:
        console.print(f"\n> {question.text}", markup=False, highlight=False)
        waiting = console.status(f"turn {question.title}: prefilling")
        waiting.start()

        def show(piece: str) -> None:
            waiting.stop()
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True, style="green")

        try:
            turns.append(conversation.ask(question, message, show))
        finally:
            waiting.stop()
        console.print()
        if found := passage(text, question.fact):
            console.print(f"  the log: {found}", markup=False, highlight=False, style="dim")

    with Client(gateway) as client:
        conversation = DemoConversation(client, codec, max_tokens)
        ask(conversation, FIRST, f"{text}\n\n{FIRST.text}")
        ask(conversation, FOLLOW_UP, FOLLOW_UP.text)
        ask(conversation.fork(turns[0]), FORKED, FORKED.text)
    console.print()
    return turns


def _report(
    console: Console, options: DemoOptions, turns: list[DemoTurn], verdicts: list[Verdict], seconds: float
) -> int:
    console.print(_table(turns))
    for verdict in verdicts:
        lead = f"smallest lead over the second-best token {verdict.smallest_lead:.2g} logits"
        console.print(f"turn {verdict.title}: {_outcome(verdict)} ({lead})")
    console.print(FOLLOW_UP_TOOK[turns[1].answer["plan"]["algorithm"]])
    passed = all(verdict.is_equal and verdict.is_right is not False for verdict in verdicts)
    console.print(f"{'done' if passed else 'FAILED'} in {seconds:.1f} s; nothing is left running")
    if options.json:
        report = {
            "passed": passed,
            "seconds": seconds,
            "turns": [
                {"title": turn.question.title, **turn.answer, "tokens_per_rank": turn.tokens_per_rank} for turn in turns
            ],
            "equal_to_transformers": [verdict.is_equal for verdict in verdicts],
            "right": [verdict.is_right for verdict in verdicts],
        }
        json.dump(report, sys.stdout)
        print()
    return 0 if passed else 1


def _outcome(verdict: Verdict) -> str:
    right = {True: "right, ", False: "WRONG, ", None: ""}[verdict.is_right]
    if not verdict.is_equal:
        return f"{right}DIFFERENT: transformers chooses {verdict.expected}"
    return f"{right}every token is transformers' own choice"


def _table(turns: list[DemoTurn]) -> Table:
    """Return a table with a column for each turn."""
    table = Table("", *(turn.question.title for turn in turns))
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
    usages = [turn.answer["usage"] for turn in turns]
    table.add_row(
        "drafted tokens", *(f"{usage['accepted_draft_tokens']} of {usage['completion_tokens']}" for usage in usages)
    )
    table.add_row("migrated to decode", *(f"{plan['migrated_bytes'] / 1e6:.2f} MB" for plan in plans))
    table.add_row("pulled from decode", *(f"{plan['pulled_bytes'] / 1e6:.2f} MB" for plan in plans))
    for ring in turns[0].tokens_per_rank:
        held = ("  ".join(f"{tokens}" for tokens in turn.tokens_per_rank.get(ring, [])) for turn in turns)
        table.add_row(f"KV tokens per rank, {ring}", *held)
    return table


def _sources(plan: dict[str, Any]) -> str:
    parts = (f"{item['source']} [{item['start']}, {item['stop']})" for item in plan["cached_sources"])
    return "\n".join(parts) or "-"

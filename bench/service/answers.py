"""`python -m bench answers`: conversations with models on a whole service, token for token beside transformers.

The bench command line registers it with `add`; `run` starts and stops a local cluster for each model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.options import Subcommands
from ringserve.client import Client
from ringserve.client.requests import Sampling
from ringserve.client.results import Answer
from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.services.cluster.local import LocalCluster
from ringserve.services.config import config_from
from ringserve.services.offline.reference import StockModel
from ringserve.services.offline.terminal import console, listing, print_table
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info

HELP = """Serve each model by a prefill ring and a decode ring of two ranks, and hold a conversation with it for every
prefill algorithm, and one in which the service chooses. Prompts are random tokens. Every answer must have the tokens
that transformers chooses."""
EXAMPLE = """example:
  python -m tests.workers.models /tmp/families && python -m bench answers /tmp/families/*
"""
TURNS = (700, 9, 1, 300)
"""New tokens of each turn."""
ANSWER = 24
WAIT_SECONDS = 600.0

Ask = Callable[[str, Sequence[int], str | None], Answer]
"""Send the whole history of a conversation, to be prefilled by an algorithm if one is named."""


@dataclass(frozen=True, slots=True)
class Found:
    """Answers of one model: how many equal transformers', of how many, and the algorithms that computed them."""

    equal: int
    turns: int
    algorithms: tuple[str, ...]


def converse(ask: Ask, follow: Callable[[Sequence[int], Sequence[int]], Any], vocab_size: int) -> Found:
    """Hold a conversation for every algorithm, which only turns of many tokens name, and compare each answer."""
    equal, used, draws = 0, set[str](), np.random.default_rng(0)
    conversations = [*PREFILL_ALGORITHMS, None]
    for number, algorithm in enumerate(conversations):
        history: list[int] = []
        for count in TURNS:
            history += draws.integers(0, vocab_size, count).tolist()
            answer = ask(f"answers-{number}", history, algorithm if count > ANSWER else None)
            tokens = list(answer.token_ids)
            equal += bool(tokens) and follow(history, tokens).token_ids == tokens
            if answer.plan.algorithm:
                used.add(answer.plan.algorithm)
            history += tokens
    return Found(equal, len(conversations) * len(TURNS), tuple(sorted(used)))


@contextmanager
def served(model: str) -> Iterator[Ask]:
    """Serve a model inside the `with` block."""
    config = config_from(
        {
            "model": {"path": model, "dtype": "float32"},
            "prefill": {"cp": 2},
            "decode": {"cp": 2},
            "kv_cache": {"tokens_per_rank": 8192},
            "gateway": {"listen": "127.0.0.1:0", "http": "", "metrics": "", "spare": False},
            "router": {"spare": False},
            "logs": {"level": "error"},
        }
    )
    cluster = LocalCluster(config, lambda _: None)
    cluster.start()
    try:
        with Client(cluster.gateway_address) as client:
            sampling = Sampling(temperature=0.0, max_tokens=ANSWER)

            def ask(conversation: str, history: Sequence[int], algorithm: str | None) -> Answer:
                asked: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
                return client.ask(
                    list(history),
                    conversation_id=conversation,
                    mode="whole_history",
                    sampling=sampling,
                    timeout=WAIT_SECONDS,
                    **asked,
                )

            yield ask
    finally:
        cluster.stop()


def add(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "answers",
        help="answers of models on a whole service beside transformers",
        description=HELP,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL", help="model directory, or a built-in model")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve the models one after another and print their table. Return 1 if any answer differs."""
    table = listing("model", "family", "equal answers", "algorithms")
    differs = False
    for model in options.models:
        path = resolve_model_path(model)
        info, stock = read_model_info(path), StockModel(path)
        print(f"{info.name}: serving", flush=True)
        with served(model) as ask:
            found = converse(ask, stock.follow, info.vocab_size)
        differs |= found.equal < found.turns
        table.add_row(info.name, info.model_type, f"{found.equal} of {found.turns}", ", ".join(found.algorithms))
    print_table(console(), table)
    return int(differs)

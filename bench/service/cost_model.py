"""Predicted and measured prefill of the whole service (decision 0011), with its start-up and TTFT beside transformers.

    python -m bench cost-model --ranks 1,2 --tokens 8192 --runs 5

Ranks have one thread, transformers has two. Clusters start, run and stop in alternation with transformers, `--rounds`
times, so that a drifting machine affects all. The output is one JSON object a line: first medians with least and most,
in seconds, then ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np

from bench.options import Subcommands
from bench.rings.prefill import PrefillTask, StockRank
from bench.rings.ring_processes import RingProcesses
from ringserve.client import Answer, Client, Sampling
from ringserve.services.cluster.local import LocalCluster
from ringserve.services.config import Config, PrefillConfig
from ringserve.services.offline.demo import demo_config
from ringserve.services.offline.reports import Summary

SMALL_REQUESTS = 40
SMALL_TOKENS = 16
DECODE_TOKENS = 128
LETTERS = range(32, 127)


def add(commands: Subcommands) -> None:
    parser = commands.add_parser("cost-model", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", default="1,2", help="prefill ring sizes")
    parser.add_argument("--tokens", type=int, default=8192, help="new tokens of each prompt")
    parser.add_argument("--runs", type=int, default=3, help="prompts a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    sizes = [int(size) for size in options.ranks.split(",")]
    seen: dict[str, list[float]] = defaultdict(list)
    for number in range(options.rounds):
        for cp in sizes:
            _measure_cluster(seen, cp, options.tokens, options.runs, seed=number)
        seen["ttft transformers, 2 threads"] += _stock(2, options.tokens, options.runs)
    for name, values in seen.items():
        _print(name, values)
    reference = statistics.median(seen["ttft transformers, 2 threads"])
    for cp in sizes:
        ttft = statistics.median(seen[f"ttft cp{cp}"])
        ratio = {f"cp{sizes[0]} over this": statistics.median(seen[f"ttft cp{sizes[0]}"]) / ttft}
        print(json.dumps({"name": f"cp{cp}", **ratio, "this over transformers": ttft / reference}))
    return 0


def _measure_cluster(seen: dict[str, list[float]], cp: int, tokens: int, runs: int, seed: int) -> None:
    base = demo_config("builtin:tiny", max_positions=131072)
    config: Config = replace(base, prefill=PrefillConfig(cp=cp, chunk_tokens=max(16384, tokens)))
    cluster = LocalCluster(config)
    started = time.perf_counter()
    try:
        cluster.start()
        seen[f"start-up cp{cp}"].append(time.perf_counter() - started)
        with Client(cluster.gateway_address) as client:
            _turn(client, _prompt(64, 1), 2)  # warm-up
            for run in range(runs):
                done = _turn(client, _prompt(tokens, 1000 * seed + run), 1)
                seen[f"ttft cp{cp}"].append(done.ttft_seconds)
                seen[f"prefill cp{cp}"].append(done.plan.prefill_seconds)
                seen[f"prefill predicted over measured cp{cp}"].append(
                    done.plan.predicted_prefill_seconds / done.plan.prefill_seconds
                )
            for run in range(SMALL_REQUESTS):
                done = _turn(client, _prompt(SMALL_TOKENS, run), 1)
                seen[f"service adds to a request cp{cp}"].append(done.ttft_seconds - done.plan.prefill_seconds)
            done = _turn(client, _prompt(SMALL_TOKENS, 7), DECODE_TOKENS)
            seen[f"ttit at {SMALL_TOKENS} tokens cp{cp}+2"].append(done.ttit_seconds)
    finally:
        cluster.stop()


def _prompt(num_tokens: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).choice(LETTERS, num_tokens).tolist()
    return tokens


def _turn(client: Client, prompt: Sequence[int], max_tokens: int) -> Answer:
    return client.ask(prompt, sampling=Sampling(max_tokens=max_tokens), timeout=300)


def _stock(threads: int, tokens: int, runs: int) -> list[float]:
    with RingProcesses(1, partial(StockRank, "builtin:tiny")) as process:
        tasks = [PrefillTask(np.array(_prompt(tokens, run)), threads) for run in range(runs + 1)]
        return [process.measure(task)[0].seconds for task in tasks][1:]


def _print(name: str, values: list[float]) -> None:
    print(json.dumps({"name": name, **asdict(Summary.of(values))}), flush=True)

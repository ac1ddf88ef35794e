"""Gathered parts against pass-Q, step by step in turn on one ring, beside what the rule predicts and would choose.

    python bench/decode_variants.py --ranks 2 --batch 1,8,32 --context 1024,8192

One process a rank, one thread a process, the transport that serves CPUs, fp32, random KV. Prints one JSON object a
line: median and least milliseconds of a decode step (layers, head, sampling) with each variant, and the predictions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from cp_core.attention.backends import select_backend
from cp_core.cost.decode import VARIANTS
from cp_core.transport.connect import RingStore, connect_ring
from workers.decode.batch import BatchChange, BatchState
from workers.decode.loop import DecodeChoice
from workers.decode.step import DecodePass
from workers.kv.cache import KvCache
from workers.model.builtin import resolve_model_path
from workers.model.loading import load_model
from workers.protocol.decode_commands import AdmitSequence
from workers.rank.probe import probe_decode_rates, probe_rates
from workers.sampling.parameters import SamplingParameters

HOST = "127.0.0.1"
TIMEOUT_SECONDS = 120.0
BLOCK_TOKENS = 64
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, the same on every rank. `steps` of each variant."""

    ranks: int
    model: str
    batches: list[int]
    contexts: list[int]
    steps: int


def run_rank(rank: int, port: int, options: Options, answer: Connection, store: RingStore | None = None) -> None:
    """One rank: every case, the variants in turn; rank 0 answers."""
    torch.set_num_threads(1)
    cpu, size = torch.device("cpu"), options.ranks
    ring = connect_ring(HOST, port, "bench", rank, size, TIMEOUT_SECONDS, store=store)
    model = load_model(resolve_model_path(options.model), "float32", "cpu")
    info, attention = model.info, select_backend("auto", cpu, torch.float32)
    choice = DecodeChoice("auto", info.shape, size)
    longest = max(options.contexts) * max(options.batches) // size
    blocks_each = max(options.contexts) // size // BLOCK_TOKENS + 2
    cache = KvCache(
        num_layers=info.num_layers,
        num_blocks=blocks_each * max(options.batches),
        block_tokens=BLOCK_TOKENS,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
    )
    assert cache.num_blocks * BLOCK_TOKENS > longest
    with torch.inference_mode():
        for layer in (*cache.k_layers, *cache.v_layers):
            layer.normal_()
        rates = probe_rates(info, cpu, attention, ring)
        choice.measured(probe_decode_rates(rates, info, cpu, attention, ring))
        for context in options.contexts:
            for num_sequences in options.batches:
                batch = BatchState(rank, size, BLOCK_TOKENS)
                batch.advance((), BatchChange(admitted=tuple(_admissions(num_sequences, context, size, blocks_each))))
                step = DecodePass(model, ring, cache, attention, batch)
                seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
                for number in range(options.steps + WARM_UP_STEPS):
                    for variant in VARIANTS:
                        ring.gather_all(torch.zeros(1), list(torch.empty(size, 1))).wait()
                        begun = time.perf_counter()
                        step.run(variant)
                        if number >= WARM_UP_STEPS:
                            seconds[variant].append(time.perf_counter() - begun)
                        batch.advance([number] * num_sequences, BatchChange())
                if rank == 0:
                    stored = num_sequences * context
                    record = {
                        "ranks": size,
                        "batch": num_sequences,
                        "context": context,
                        **{f"{each}_ms": _milliseconds(statistics.median(seconds[each])) for each in VARIANTS},
                        **{f"{each}_least_ms": _milliseconds(min(seconds[each])) for each in VARIANTS},
                        **{
                            f"{each}_predicted_ms": _milliseconds(value)
                            for each, value in choice.predicted(num_sequences, stored)
                        },
                        "auto": choice(num_sequences, stored),
                    }
                    answer.send(record)
    if rank == 0:
        answer.send(None)
    ring.close()


def _admissions(num_sequences: int, context: int, size: int, blocks_each: int) -> list[AdmitSequence]:
    """Sequences of about one length, each at its own place of the round over the ranks, so that owners differ."""
    admissions = []
    for number in range(num_sequences):
        held = [context // size] * size
        for extra in range(number % size):
            held[extra] += 1
        blocks = tuple(range(number * blocks_each, (number + 1) * blocks_each))
        admissions.append(
            AdmitSequence(
                sequence_id=f"s{number}",
                token_id=1,
                position=sum(held),
                held=tuple(held),
                blocks=(blocks,) * size,
                sampling=SamplingParameters(),
            )
        )
    return admissions


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _host_rank(options: Options, answer: Connection, port_sender: Connection) -> None:
    store = RingStore(HOST)
    port_sender.send(store.port)
    run_rank(0, store.port, options, answer, store)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Parse, start one process a rank, print what rank 0 says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--batch", type=_numbers, default=[1, 8, 32], help="sequences, such as 1,8")
    parser.add_argument("--context", type=_numbers, default=[1024], help="stored tokens of each, such as 1024,8192")
    parser.add_argument("--steps", type=int, default=15, help="of each variant in each case")
    given = parser.parse_args()
    options = Options(
        ranks=given.ranks, model=given.model, batches=given.batch, contexts=given.context, steps=given.steps
    )
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    port_receiver, port_sender = context.Pipe(duplex=False)
    processes = [context.Process(target=_host_rank, args=(options, sender, port_sender))]
    processes[0].start()
    port = port_receiver.recv()
    for rank in range(1, options.ranks):
        processes.append(context.Process(target=run_rank, args=(rank, port, options, sender)))
        processes[-1].start()
    while receiver.poll(TIMEOUT_SECONDS) and (record := receiver.recv()) is not None:
        print(json.dumps(record), flush=True)
    for process in processes:
        process.join(TIMEOUT_SECONDS)


if __name__ == "__main__":
    main()

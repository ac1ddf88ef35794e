"""Rank workers, steps and models with which the benches of rings and of selection measure.

Each rank process of a bench starts its own worker; the models lie in temporary directories.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bench.rings.ring_processes import RankPlace
from bench.systems.chain_cuts import equal_work_cuts
from ringserve.cp_core.cost.chain import Cuts, chain_rates
from ringserve.cp_core.cost.decode import GATHER
from ringserve.cp_core.cost.model import ModelShape, PrefillRates
from ringserve.cp_core.layout.shards import cut_layout, segment_layout, stored_on_chain
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.views import RingRates
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import RankSettings, RankSpec
from ringserve.workers.protocol.steps import Algorithm, PrefillStep, SequencePrefill
from ringserve.workers.rank.worker import RankWorker

BLOCK_TOKENS = 16


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


class Sharing(StrEnum):
    """What bench ranks share: tokens; weights and heads for all tokens; these and rows between attention and MLP."""

    TOKENS = "ring"
    HEADS = "tensor parallel"
    HEADS_AND_ROWS = "SP-TP"


def start_worker(
    place: RankPlace,
    role: str,
    model: str,
    num_blocks: int,
    max_batch: int = 1,
    decode_variant: str = GATHER,
    sharing: Sharing = Sharing.TOKENS,
) -> RankWorker:
    """Start a worker at its place in the ring and measure its rates; collective. Raises ModelRefused, Unavailable.

    There may be more ranks that share heads than KV heads.
    """
    shares_heads = sharing is not Sharing.TOKENS
    worker = RankWorker()
    worker.start(
        RankSpec(
            ring=f"bench-{role}",
            rank=place.rank,
            num_ranks=place.num_ranks,
            incarnation=f"bench-{role}@{place.port}",
            settings=RankSettings(
                model_path=model,
                num_blocks=num_blocks,
                block_tokens=BLOCK_TOKENS,
                max_batch=max_batch,
                packs_weights=True,
                packs_head=role == "decode",
                decode_variant=decode_variant,
                tp=place.num_ranks if shares_heads else 1,
                replicates_kv=shares_heads,
                scatters_rows=sharing is Sharing.HEADS_AND_ROWS,
            ),
        )
    )
    attach(worker, place.transport, sharing)
    worker.probe()
    return worker


def attach(worker: RankWorker, transport: RingTransport, sharing: Sharing) -> None:
    """Let the worker use a connected ring, whose ranks share the tokens or the heads."""
    if sharing is not Sharing.TOKENS and transport.size > 1:
        worker.attach(InProcessRing(1).transports[0], transport)
    else:
        worker.attach(transport)


def bench_step(
    piece: SequencePrefill, algorithm: Algorithm, cuts: Sequence[int] = (), num_segments: int = 1
) -> PrefillStep:
    """Return a step of one sequence by an algorithm.

    `cuts` are those of a chain, which stores KV as evenly as they allow; `num_segments` are those of SP-NTP.
    """
    level = piece.layout
    if algorithm is Algorithm.SP_NTP and num_segments > 1:
        counts = [level.tokens_on(rank) for rank in range(level.num_ranks)]
        segmented = replace(piece, layout=segment_layout(level.start, counts, num_segments))
        return PrefillStep(algorithm=algorithm, sequences=(segmented,), num_segments=num_segments)
    if algorithm is Algorithm.CHAIN:
        order = range(level.num_ranks)
        stored = stored_on_chain(level.start, cuts, [level.tokens_on(rank) for rank in order], order)
        layout = cut_layout(level.start, cuts, order)
        piece = replace(piece, layout=layout, stored=None if stored == layout.shard_map() else stored)
    return PrefillStep(algorithm=algorithm, sequences=(piece,))


def even_cuts(shape: ModelShape, num_ranks: int, new_tokens: int, cached_tokens: int) -> Cuts:
    """Return the cuts by which all ranks of a chain have equally many FLOP, for chains whose rates are not known."""
    rates = RingRates(gemm_flops=1.0, attention_flops=1.0, link_bytes_per_second=math.inf, link_latency_seconds=0.0)
    return equal_work_cuts(new_tokens, cached_tokens, chain_rates(shape, PrefillRates(ring=rates), num_ranks))


@contextmanager
def with_layers(model: str, num_layers: int | None) -> Iterator[Path]:
    """Yield the directory of `model`, or a temporary one of its shape with `num_layers` layers of random weights.

    The cost of a step depends on the shape, not on the weights. Raises ModelRefused.
    """
    path = resolve_model_path(model)
    if num_layers is None or read_model_info(path).num_layers == num_layers:
        yield path
        return
    disable_progress_bar()
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * num_layers
    with tempfile.TemporaryDirectory(prefix="ringserve-bench-") as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        yield Path(folder)

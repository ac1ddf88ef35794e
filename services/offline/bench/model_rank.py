"""Rank workers and models of measurements."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from cp_core.cost.decode import GATHER
from services.offline.bench.ring_processes import RankPlace
from workers.model.builtin import resolve_model_path
from workers.model.info import read_model_info
from workers.protocol.ranks import RankSettings, RankSpec
from workers.rank.worker import RankWorker

BLOCK_TOKENS = 16


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def start_worker(
    place: RankPlace, role: str, model: str, num_blocks: int, max_batch: int = 1, decode_variant: str = GATHER
) -> RankWorker:
    """Start a worker at its place in the ring and measure its rates; collective. Raises ModelRefused, Unavailable."""
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
            ),
        )
    )
    worker.attach(place.transport)
    worker.probe()
    return worker


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

"""Rank of the selection bench: prefixes in its cache, and prefills after them by any algorithm.

The selection bench starts it in each process of a ring. It owns its workers and their KV caches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.rings.model_rank import Sharing, attach, bench_step, blocks_for, start_worker
from bench.rings.prefill import drawn_prompt
from bench.rings.ring_processes import RankPlace
from bench.rings.rounds import Sample, timed
from bench.selection.links import LinkRate, Links
from ringserve.cp_core.cost.chain import Cuts
from ringserve.cp_core.layout.shards import PrefillLayout, balanced_layout
from ringserve.services.offline.calibration.measurement import Cell
from ringserve.views import RingRates
from ringserve.workers.model.builtin import resolve_model_path
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.steps import RING_ALGORITHMS, Algorithm, PrefillStep, SequencePrefill
from ringserve.workers.rank.worker import RankWorker
from ringserve.workers.sampling.parameters import SamplingParameters

# Maximum tokens of one prefill step of a prefix; bounds the step's memory.
PREFIX_STEP_TOKENS = 4096
NAME = "bench"
# As a share of the largest logit: all algorithms sum the same products in float32, in different orders.
MAX_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Shape:
    """Task that gives the links a rate; answered with None."""

    rate: LinkRate


@dataclass(frozen=True, slots=True)
class Probe:
    """Task that measures the rank and its link, as a ring does at its start; answered with RingRates."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Task of one prefill step; a chain has `cuts`, SP-NTP `num_segments`; answered with Prefilled."""

    cell: Cell
    algorithm: Algorithm
    cuts: Cuts = ()
    num_segments: int = 1


@dataclass(frozen=True, slots=True)
class TensorPrefill:
    """Task of a prefill without cached tokens by ranks that share the weights; answered with Prefilled."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Compare:
    """Task of one cell by all algorithms; answered with Difference."""

    cell: Cell
    cuts: Cuts


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefilled(Sample):
    """Sample with the sampled `token`, None on ranks without the last position."""

    token: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Largest difference of any algorithm's logits from those of pass-KV on this rank, and the largest logit.

    Both are 0 on a rank without new tokens.
    """

    most: float
    largest: float

    @property
    def is_rounding(self) -> bool:
        """True if the difference is one of rounding; a NaN is not."""
        return self.most <= MAX_DIFFERENCE * self.largest


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Prefix of cached tokens: those `held` by each rank, and this rank's blocks of the prefix and the new tokens."""

    held: tuple[int, ...]
    blocks: tuple[int, ...]


class SelectionRank:
    """Rank with a prefix of every length in `cached`; a prefill overwrites the new tokens of the one before.

    If `tensor_tokens` is not 0, it also prefills prompts of up to so many tokens with a share of the weights.
    """

    def __init__(
        self, model: str, cached: tuple[int, ...], most_new: int, links: Links, tensor_tokens: int, place: RankPlace
    ) -> None:
        self._links = links
        self._place = place
        self._transport = place.transport
        self._vocabulary = read_model_info(resolve_model_path(model)).vocab_size
        # A rank gets at most two tokens over its share of a step of the prefix; a chain may store all new tokens on one
        # rank.
        each = [
            blocks_for(sum(-(-tokens // place.num_ranks) + 2 for tokens in _prefix_steps(prefix)) + most_new)
            for prefix in cached
        ]
        self._worker = start_worker(place, "prefill", model, sum(each))
        self._tensor_blocks = tuple(range(blocks_for(tensor_tokens)))
        self._tensor: RankWorker | None = None
        if tensor_tokens:
            self._tensor = start_worker(place, "prefill", model, len(self._tensor_blocks), sharing=Sharing.HEADS)
        self._prefixes: dict[int, _Prefix] = {}
        first = 0
        for prefix, count in zip(cached, each, strict=True):
            self._prefixes[prefix] = self._made(prefix, tuple(range(first, first + count)))
            first += count

    def measure(self, task: Any) -> Prefilled | Difference | RingRates | None:
        match task:
            case Shape(rate):
                self._transport = self._links.shape(self._place.transport, rate)
                self._worker.attach(self._transport)
                if self._tensor is not None:
                    attach(self._tensor, self._transport, Sharing.HEADS)
                return None
            case Probe():
                return self._worker.probe()
            case Prefill():
                step = self._step(task.cell, task.algorithm, task.cuts, task.num_segments)
                return self._prefilled(self._worker, step)
            case TensorPrefill(num_tokens):
                assert self._tensor is not None, "the rank has no share of the weights"
                return self._prefilled(self._tensor, self._tensor_step(num_tokens))
            case Compare():
                return self._compare(task)
        raise TypeError(f"no task of this bench: {task!r}")

    def close(self) -> None:
        self._worker.stop()
        if self._tensor is not None:
            self._tensor.stop()

    def _tensor_step(self, num_tokens: int) -> PrefillStep:
        piece = SequencePrefill(
            sequence_id=NAME,
            token_ids=drawn_prompt(num_tokens, self._vocabulary),
            layout=balanced_layout(0, num_tokens, (0,)),
            cached=(0,),
            blocks=self._tensor_blocks,
            sample=SamplingParameters(),
        )
        return PrefillStep(algorithm=Algorithm.PASS_KV, sequences=(piece,))

    def _prefilled(self, worker: RankWorker, step: PrefillStep) -> Prefilled:
        tokens: list[int | None] = []
        sample = timed(self._transport, lambda: tokens.append(worker.prefill(step).tokens.get(NAME)))
        return Prefilled(
            seconds=sample.seconds, cpu_seconds=sample.cpu_seconds, wait_seconds=sample.wait_seconds, token=tokens[0]
        )

    def _compare(self, task: Compare) -> Difference:
        """Compare the logits[T, vocab_size] of this rank's T new tokens.

        In a chain the ranks have other tokens: its logits are compared with those of pass-KV on the same layout.
        """
        most, largest = torch.zeros(()), torch.zeros(())
        by_layout: dict[PrefillLayout, Tensor] = {}
        for name in RING_ALGORITHMS:
            step = self._step(task.cell, name, task.cuts)
            (piece,) = step.sequences
            if piece.layout not in by_layout:
                plain = replace(step, algorithm=Algorithm.PASS_KV, sequences=(replace(piece, stored=None),))
                by_layout[piece.layout] = self._worker.prefill_logits(plain)
            right, logits = by_layout[piece.layout], self._worker.prefill_logits(step)
            if right.numel():
                most, largest = (
                    torch.maximum(most, (right - logits).abs().max()),
                    torch.maximum(largest, right.abs().max()),
                )
        return Difference(most=float(most), largest=float(largest))

    def _made(self, cached: int, blocks: tuple[int, ...]) -> _Prefix:
        """Prefill a prefix. Collective."""
        held, tokens, start = (0,) * self._place.num_ranks, drawn_prompt(cached, self._vocabulary), 0
        for count in _prefix_steps(cached):
            layout = balanced_layout(start, count, held)
            piece = SequencePrefill(
                sequence_id=NAME, token_ids=tokens[start : start + count], layout=layout, cached=held, blocks=blocks
            )
            self._worker.prefill(PrefillStep(algorithm=Algorithm.PASS_KV, sequences=(piece,)))
            held = tuple(had + layout.tokens_on(rank) for rank, had in enumerate(held))
            start += count
        return _Prefix(held, blocks)

    def _step(self, cell: Cell, algorithm: Algorithm, cuts: Cuts, num_segments: int = 1) -> PrefillStep:
        prefix = self._prefixes[cell.cached_tokens]
        piece = SequencePrefill(
            sequence_id=NAME,
            token_ids=drawn_prompt(cell.new_tokens, self._vocabulary),
            layout=balanced_layout(cell.cached_tokens, cell.new_tokens, prefix.held),
            cached=prefix.held,
            blocks=prefix.blocks,
            sample=SamplingParameters(),
        )
        return bench_step(piece, algorithm, cuts, num_segments)


def _prefix_steps(cached: int) -> list[int]:
    """Return the tokens of each step that makes a prefix."""
    return [min(PREFIX_STEP_TOKENS, cached - start) for start in range(0, cached, PREFIX_STEP_TOKENS)]

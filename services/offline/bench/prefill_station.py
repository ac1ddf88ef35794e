"""One rank of the prefill bench: a whole model over a prompt, by a ring of rank workers or by transformers itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cp_core.layout.shards import balanced_layout
from services.offline.bench.model_rank import blocks_for, start_worker
from services.offline.bench.ring_processes import Seat
from services.offline.bench.sample import Sample, timed, timed_gemm
from services.offline.reference import StockModel
from workers.model.builtin import resolve_model_path
from workers.protocol.steps import Algorithm, PrefillStep, Sampling, SequencePrefill, TokenIds


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """`token_ids` is the prompt, None for a matrix product; `threads` only matter to transformers."""

    token_ids: TokenIds | None
    threads: int = 1


class RingStation:
    """A rank worker. Its time ends with the sampled token: TTFT without the service around it."""

    def __init__(self, model: str, max_tokens: int, algorithm: Algorithm, seat: Seat) -> None:
        self._seat = seat
        self._algorithm = algorithm
        # The 2N-chunk layout gives no rank more than two tokens over its share.
        self._num_blocks = blocks_for(max_tokens // seat.num_ranks + 2)
        self._worker = start_worker(seat, "prefill", model, self._num_blocks)

    def measure(self, task: PrefillTask) -> Sample:
        if task.token_ids is None:
            return timed_gemm(self._seat.transport)
        held = (0,) * self._seat.num_ranks
        sequence = SequencePrefill(
            sequence_id="bench",
            token_ids=task.token_ids,
            layout=balanced_layout(0, len(task.token_ids), held),
            cached=held,
            blocks=tuple(range(self._num_blocks)),
            sample=Sampling(),
        )
        step = PrefillStep(algorithm=self._algorithm, sequences=(sequence,))
        return timed(self._seat.transport, lambda: self._worker.prefill(step))

    def close(self) -> None:
        self._worker.stop()


class StockStation:
    """transformers in a process of its own, with as many threads as a ring has ranks."""

    def __init__(self, model: str, seat: Seat) -> None:
        self._seat = seat
        self._stock = StockModel(resolve_model_path(model))

    def measure(self, task: PrefillTask) -> Sample:
        assert task.token_ids is not None, "transformers measures no matrix product"
        prompt = task.token_ids.tolist()
        torch.set_num_threads(task.threads)
        return timed(self._seat.transport, lambda: self._stock.greedy(prompt, 1))

    def close(self) -> None:
        """Nothing is held."""


def drawn_prompt(num_tokens: int, vocab_size: int) -> TokenIds:
    """Any tokens: what a prefill costs does not depend on them."""
    return np.random.default_rng(num_tokens).integers(vocab_size, size=num_tokens, dtype=np.int64)

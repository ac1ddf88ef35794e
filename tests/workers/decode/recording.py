"""Recorder of a CPU, ranks that compile and record by it, and a kernel that a device could record."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from cp_core.attention.paged import PagedShards
from cp_core.attention.partial import Partial
from cp_core.attention.reference import ReferenceAttention
from tests.workers.models import VOCAB_SIZE
from tests.workers.rings import LocalRing
from workers.decode import graphs
from workers.decode.graphs import Recorded, RecordedPieces
from workers.model import pieces as compiler
from workers.model.loading import AttentionStep
from workers.model.pieces import Pieces
from workers.rank import parts as rank_parts


class KeptFunctions:
    """Recorder that keeps each function and computes it again into the same results, which hold NaN until then.

    Recording number `fault` (from 1 on) fails, as does any after it.
    """

    def __init__(self, fault: int = 1 << 30) -> None:
        self._fault = fault
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, compute: Callable[[], Any]) -> Recorded:
        self.num_recorded += 1
        if self.num_recorded >= self._fault:
            raise RuntimeError("no memory for a recording")
        found = compute()
        results = tuple(map(poisoned, found)) if isinstance(found, tuple | list) else poisoned(found)

        def replay() -> None:
            self.num_replayed += 1
            again = compute()
            pairs = zip(results, again, strict=True) if isinstance(results, tuple) else [(results, again)]
            for result, each in pairs:
                result.copy_(each)

        return Recorded(replay, results)


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)


class PoisonedPieces(RecordedPieces):
    """Recorded pieces whose rows of padding hold NaN wherever they are read."""

    def run(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        if self.attended is not None:
            self.attended[token_ids.shape[0] :] = torch.nan
        return super().run(token_ids, positions, step)


class TabledAttention(ReferenceAttention):
    """Reference that reads tables and lengths as a device does, and gives NaN for rows of which nothing is stored."""

    skips_empty: ClassVar[bool] = True

    def paged_attention(self, q: Tensor, shards: PagedShards, *, scale: float) -> Partial:
        parts = []
        for row, stored in enumerate(shards.lengths.tolist()):
            if stored:
                alone = PagedShards(
                    shards.k, shards.v, shards.table[row : row + 1], (stored,), shards.lengths[row : row + 1]
                )
                parts.append(super().paged_attention(q[row : row + 1], alone, scale=scale))
            else:
                nothing = torch.full(q.shape[1:2], -torch.inf)
                parts.append(Partial(poisoned(q[row : row + 1]), nothing[None]))
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


TRACED: dict[tuple[str, str], Pieces] = {}
TRACING = threading.Lock()


def traced_once(body: Module, device: torch.device, backend: str, columns: int) -> Pieces:
    """Trace a model once for all tests, as the weights of each load are the same; a share of them each time."""
    with TRACING:
        is_whole = body.get_input_embeddings().weight.shape[0] == VOCAB_SIZE and not columns  # type: ignore[operator]
        if not is_whole:
            return TRACE(body, device, backend, columns)
        key = (str(body.config._name_or_path), backend)  # type: ignore[union-attr]
        if key not in TRACED:
            TRACED[key] = TRACE(body, device, backend, columns)
        return TRACED[key]


TRACE = compiler.trace


@contextmanager
def recording(
    recorder: KeptFunctions, monkeypatch: pytest.MonkeyPatch, *, is_whole: bool = False, backend: str = "eager"
) -> Iterator[pytest.MonkeyPatch]:
    """Let ranks compile and record as on a GPU; whole steps where the ring is of one rank and `is_whole`.

    Yields what undoes this at the end: patches on top of it go there.
    """
    with monkeypatch.context() as patch:
        patch.setattr(rank_parts, "compilation_of", lambda _: rank_parts.Compilation(backend, recorder))
        patch.setattr(graphs, "RecordedPieces", PoisonedPieces)
        patch.setattr(compiler, "trace", traced_once)
        if is_whole:
            patch.setattr(rank_parts, "select_backend", lambda *_: TabledAttention())
        yield patch


def compile_ranks(ring: LocalRing) -> None:
    """Let all ranks measure themselves, and compile their model thereafter."""
    ring.together(lambda worker, _: worker.probe())
    assert all(worker.parts.model.pieces is not None for worker in ring.workers)

"""Recorder of a CPU, ranks that compile and record by it, and a kernel that a device could record."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from ringserve.cp_core.attention.partial import PagedShards, Partial
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.cost.decode import MAX_DRAFTS
from ringserve.views import RingRates
from ringserve.workers.decode import graphs
from ringserve.workers.decode.graphs import Recorded, RecordedPieces
from ringserve.workers.model import pieces as compiler
from ringserve.workers.model.loading import AttentionStep
from ringserve.workers.model.pieces import Pieces
from ringserve.workers.rank import parts as rank_parts
from ringserve.workers.rank.worker import RankWorker
from tests.workers.models import VOCAB_SIZE
from tests.workers.rings import LocalRing


class KeptFunctions:
    """Recorder that keeps each function and computes it at each replay, into the results of the first.

    As on a device, nothing is computed and sent meanwhile. Recording number `fault` (from 1 on) fails, as does any
    after it. `kept` refers to what is recorded as long as it is.
    """

    def __init__(self, fault: int = 1 << 30) -> None:
        self._fault = fault
        self.num_recorded = 0
        self.num_replayed = 0
        self.kept: weakref.WeakSet[Any] = weakref.WeakSet()

    def record(self, compute: Callable[[], Any]) -> Recorded:
        self.num_recorded += 1
        if self.num_recorded >= self._fault:
            raise RuntimeError("no memory for a recording")

        def replay() -> None:
            self.num_replayed += 1
            again = compute()
            if recorded.results is None:
                recorded.results = again
                return
            pairs = (
                zip(recorded.results, again, strict=True)
                if isinstance(again, tuple | list)
                else [(recorded.results, again)]
            )
            for result, each in pairs:
                if isinstance(result, Tensor):
                    result.copy_(each)
                else:
                    assert result == each, "a piece gives another number of rows than when it was recorded"

        recorded = Recorded(replay, None)
        self.kept.add(replay)
        return recorded


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0)


class PoisonedPieces(RecordedPieces):
    """Recorded pieces whose rows of padding hold NaN wherever they are read."""

    def run(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        if self.attended is not None:
            self.attended[token_ids.shape[0] :] = torch.nan
        return super().run(token_ids, positions, step)


class TabledAttention(ReferenceAttention):
    """Reference that reads tables and bounds as a device does, and gives NaN for rows that see nothing."""

    skips_empty: ClassVar[bool] = True
    takes_bounds: ClassVar[bool] = True

    def paged_attention(self, q: Tensor, shards: PagedShards, *, scale: float) -> Partial:
        parts = []
        if shards.ends is not None:
            ends = [0, *shards.ends.tolist()]
            assert max(stop - start for start, stop in pairwise(ends)) <= MAX_DRAFTS + 1
            for start, stop in pairwise(ends):
                assert all(torch.equal(shards.table[start], shards.table[row]) for row in range(start, stop))
            assert not shards.lengths[ends[-1] :].any(), "rows behind the last end are padding"
        firsts = [0] * len(shards) if shards.firsts is None else shards.firsts.tolist()
        for row, (first, stop) in enumerate(zip(firsts, shards.lengths.tolist(), strict=True)):
            if first < stop:
                assert shards.firsts is None or stop - first <= shards.most_seen
                pages = shards.table[row, : -(-stop // shards.k.shape[1])]
                k, v = (each[pages].flatten(0, 1)[first:stop] for each in (shards.k, shards.v))
                parts.append(self.partial_attention(q[row : row + 1], k, v, causal=False, scale=scale))
            else:
                nothing = torch.full(q.shape[1:2], -torch.inf)
                parts.append(Partial(poisoned(q[row : row + 1]), nothing[None]))
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


RATES = RingRates(gemm_flops=1.0, attention_flops=1.0, link_bytes_per_second=1.0, link_latency_seconds=1.0)

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


def measured_at_once(*_: object) -> Generator[None, None, RingRates]:
    """Be a measurement of a ring without parts."""
    yield from ()
    return RATES


@contextmanager
def recording(
    recorder: KeptFunctions | Sequence[KeptFunctions],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_whole: bool = False,
    backend: str = "eager",
) -> Iterator[pytest.MonkeyPatch]:
    """Let ranks compile and record as on a GPU, by one recorder, or each by its own.

    Where `is_whole`, whole steps are recorded, on rings whose messages are on a stream or that have none. Yields what
    undoes this at the end: patches on top of it go there.
    """
    recorders = itertools.repeat(recorder) if isinstance(recorder, KeptFunctions) else iter(recorder)
    with monkeypatch.context() as patch:
        patch.setattr(rank_parts, "compilation_of", lambda _: graphs.Compilation(backend, next(recorders)))
        patch.setattr(RankWorker, "_probe", measured_at_once)
        patch.setattr(graphs, "RecordedPieces", PoisonedPieces)
        patch.setattr(compiler, "trace", traced_once)
        if is_whole:
            patch.setattr(rank_parts, "select_backend", lambda *_: TabledAttention())
        yield patch


def compile_ranks(ring: LocalRing) -> None:
    """Let all ranks compile their model, as they do once they have measured themselves."""
    ring.probe()
    assert all(worker.parts.model.pieces is not None for worker in ring.workers)

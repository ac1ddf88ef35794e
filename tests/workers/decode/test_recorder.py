"""Recorder of CUDA graphs, against a fake of torch's rules for pools, streams and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from ringserve.workers.decode.graphs import CudaRecorder

GPU = torch.device("cuda", 0)


class Graph:
    """Fake of `torch.cuda.CUDAGraph`; a pool is used by as many graphs as `uses` says."""

    uses: ClassVar[Counter[int]] = Counter()
    num_pools: ClassVar[int] = 0

    def __init__(self) -> None:
        self._pool: int | None = None

    def pool(self) -> int:
        assert self._pool is not None, "it was never recorded"
        return self._pool

    def begin(self, pool: int | None) -> None:
        if pool is None:
            Graph.num_pools += 1
            pool = Graph.num_pools
        elif not self.uses[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool = pool
        self.uses[pool] += 1

    def replay(self) -> None: ...

    def __del__(self) -> None:
        if self._pool is not None:
            self.uses[self._pool] -= 1


class Cuda:
    """Fake of torch's streams and captures. `current` is the current stream; an end of a capture fails if told so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current = "computing"
        self.priorities: list[int] = []
        self.fails_at_end = False
        self.is_capturing = False
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", self._stream)
        patch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        patch.setattr(torch.cuda, "stream", self._using)
        patch.setattr(torch.cuda, "graph", self._graph)
        patch.setattr(torch, "zeros", lambda size, device: self.current)

    def _stream(self, device: torch.device, priority: int) -> str:
        self.priorities.append(priority)
        return f"recording on {device}"

    @contextmanager
    def _using(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _graph(self, graph: Graph, pool: int | None, *, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local", "other threads use the device meanwhile"
        before, self.current = self.current, stream
        assert not self.is_capturing
        self.is_capturing = True
        graph.begin(pool)
        try:
            yield
        finally:
            self.is_capturing = False
            if self.fails_at_end:
                raise RuntimeError("operation failed due to a previous error during capture")  # as torch: no way back
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_the_pool_outlives_the_graphs_that_were_recorded_into_it(cuda: Cuda) -> None:
    """A batch that outgrows its buffers drops all recorded steps; the next are recorded into the same pool."""
    recorder = CudaRecorder(GPU)
    before = Graph.num_pools
    for _ in range(3):
        recorded = [recorder.record(lambda: cuda.current) for _ in range(2)]
        assert [each.results for each in recorded] == ["recording on cuda:0"] * 2
        del recorded
    assert Graph.num_pools == before + 1
    assert cuda.priorities == [-1], "one stream, none of those that copies of KV get"


def test_a_recording_that_fails_leaves_the_stream_of_the_steps(cuda: Cuda) -> None:
    recorder = CudaRecorder(GPU)
    cuda.fails_at_end = True
    with pytest.raises(RuntimeError, match="previous error"):
        recorder.record(lambda: None)
    assert cuda.current == "computing"
    cuda.fails_at_end = False
    recorder.record(lambda: None)
    assert cuda.current == "computing"


def test_a_process_records_one_graph_at_a_time(cuda: Cuda) -> None:
    """Ranks that are threads record in turn: torch allows one capture in a process."""
    nested: list[Callable[[], Any]] = [lambda: CudaRecorder._recording.locked()]
    assert CudaRecorder(GPU).record(nested[0]).results is True
    assert not CudaRecorder._recording.locked()

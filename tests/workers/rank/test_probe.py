"""Probe of a rank's rates: it times the kernels that serve, at sizes that keep the device busy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ringserve.cp_core.attention.partial import AttentionBackend, PagedShards, Partial
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.views import RingRates
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import ModelInfo
from ringserve.workers.rank import probe
from ringserve.workers.rank.probe import GPU_SIZES, ProbeSizes, finished, probe_decode_rates, probe_rates, sizes_on
from tests.workers.models import save_model

CPU = torch.device("cpu")
SMALL = ProbeSizes(gemm_tokens=4, query_tokens=6, stored_tokens=9, decode_tokens=10, decode_bytes=0)
RATES = RingRates(gemm_flops=1e9, attention_flops=1e9, link_bytes_per_second=1e9, link_latency_seconds=0.0)


class Tables(ReferenceAttention):
    """Kernel over block tables that notes the shapes of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.paged: set[tuple[int, ...]] = set()
        self.unpaged: set[tuple[int, int]] = set()

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        assert sorted(shards.table[0].tolist()) == list(range(shards.table.shape[1])), "each block is there once"
        assert shards.lengths.tolist() == list(shards.stored)
        self.paged.add((*q.shape, shards.k.shape[1], *shards.stored))
        return super().paged_attention(q, shards, scale=scale)

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        self.unpaged.add((q.shape[0], k.shape[0]))
        return super().partial_attention(q, k, v, causal=causal, scale=scale)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelInfo:
    monkeypatch.setattr(probe, "sizes_on", lambda *_: SMALL)
    monkeypatch.setattr(probe, "DECODE_SECONDS_PER_RATE", 0.0)
    monkeypatch.setattr(probe, "SECONDS_PER_RATE", 0.0)
    return read_model_info(save_model("llama_gqa", tmp_path))


def decode_rate(backend: AttentionBackend, info: ModelInfo, block_tokens: int) -> float:
    (ring,) = InProcessRing(1).transports
    return finished(probe_decode_rates(RATES, info, CPU, backend, ring, block_tokens)).kv_bytes_per_second


def test_decode_is_measured_over_block_tables_where_these_serve(small: ModelInfo) -> None:
    """Ten tokens are three blocks of four: the probe counts what it reads, twelve tokens."""
    backend = Tables()
    assert decode_rate(backend, small, 4) > 0.0
    assert backend.paged == {(1, small.num_heads, small.head_dim, 4, 12)}


def test_decode_is_measured_over_one_run_where_no_kernel_follows_tables(
    small: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: set[tuple[int, int]] = set()

    class Runs(TorchCpuFlash):
        def partial_attention(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
        ) -> Partial:
            calls.add((q.shape[0], k.shape[0]))
            return super().partial_attention(q, k, v, causal=causal, scale=scale)

    assert decode_rate(Runs(), small, 4) > 0.0
    assert calls == {(1, 12)}


def test_prefill_is_measured_with_many_queries(small: ModelInfo) -> None:
    backend = Tables()
    (ring,) = InProcessRing(1).transports
    assert finished(probe_rates(small, CPU, backend, ring)).attention_flops > 0.0
    assert backend.unpaged == {(6, 9)}


def test_attention_is_measured_with_numbers_whose_bits_all_count(small: ModelInfo) -> None:
    """Tiles multiply numbers that bfloat16 holds, such as ones, in fewer products."""
    shares: list[float] = []

    class Looking(TorchCpuFlash):
        def partial_attention(
            self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
        ) -> Partial:
            shares.extend(float((each.view(torch.int32) & 0xFFFF).bool().float().mean()) for each in (q, k, v))
            return super().partial_attention(q, k, v, causal=causal, scale=scale)

    (ring,) = InProcessRing(1).transports
    assert finished(probe_rates(small, CPU, Looking(), ring)).attention_flops > 0.0
    assert min(shares) > 0.99


def test_a_gpu_reads_more_than_its_cache_holds() -> None:
    gpu = torch.device("cuda", 0)
    assert sizes_on(gpu, TorchCpuFlash()) is GPU_SIZES
    assert GPU_SIZES.decode_bytes > 4 * 50e6
    assert sizes_on(gpu, ReferenceAttention()) is sizes_on(CPU, TorchCpuFlash()), "its scores would take gigabytes"


Runs = tuple[float, ...]
Windows = tuple[Runs, ...]
SHORT, SHARED = (0.001,) * 4, (0.001, 0.001, 0.001, 0.005)


@pytest.mark.parametrize(
    ("together", "alone", "lone_speed", "slowdown"),
    [
        pytest.param(
            (SHARED,), SHORT, 2.0, 2.0, id="ranks have a core in turn: most runs take as long as a lone rank's"
        ),
        pytest.param(((0.02,),), (0.01,), 2.0, 1.0, id="no run is short enough to have the core to itself"),
        pytest.param(((0.00105,),), SHORT, 1.0, 1.0, id="equal but for noise"),
        pytest.param((SHORT,), SHARED, 1.0, 1.0, id="other work while the first rank is alone"),
        pytest.param((SHARED, SHORT, SHARED), SHORT, 1.0, 1.0, id="other work that comes and goes"),
        pytest.param(((0.1,),), SHORT, 3.0, 1.0, id="no rank is faster than all together"),
    ],
)
def test_ranks_that_share_cores_measure_how_fast_one_is_alone(
    together: Windows,
    alone: Runs,
    lone_speed: float,
    slowdown: float,
    small: ModelInfo,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three ranks: every window's runs are given, those of the first rank alone too; all ranks learn the same."""
    kinds = threading.local()

    def times(budget: float, run: Callable[[], object], device: torch.device) -> list[float]:
        run()
        return list(next(kinds.left))

    monkeypatch.setattr(probe, "_times_within", times)
    monkeypatch.setattr(probe, "_overlap", lambda *_: 1.0)

    def measure(transport: RingTransport) -> RingRates:
        with_others = itertools.cycle(together)
        windows = ((runs, alone) if transport.rank == 0 else (runs,) for runs in with_others)
        kinds.left = itertools.chain([SHORT, SHORT], itertools.chain.from_iterable(windows))
        return finished(probe_rates(small, CPU, ReferenceAttention(), transport))

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(measure, InProcessRing(3).transports))
    assert [rates.lone_speed for rates in found] == pytest.approx([lone_speed] * 3)
    flops = 2.0 * SMALL.gemm_tokens * small.hidden_size * small.intermediate_size / min(SHORT)
    assert [rates.gemm_flops for rates in found] == pytest.approx([flops / slowdown] * 3)
    attention = 4.0 * SMALL.query_tokens * SMALL.stored_tokens * small.num_heads * small.head_dim / min(SHORT)
    assert [rates.attention_flops for rates in found] == pytest.approx([attention / slowdown] * 3)

"""Profile with round numbers, a model small enough to count by hand, and chains of a larger one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ringserve.cp_core.cost.chain import ChainRates
from ringserve.cp_core.cost.model import ModelShape, PrefillRates
from ringserve.cp_core.cost.profile import DecodeConstants, HardwareProfile, PrefillConstants
from ringserve.views import RingRates

TINY = ModelShape(
    num_layers=2,
    hidden_size=8,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    element_bytes=2,
)
ROUND = HardwareProfile(
    name="round",
    source="made up",
    processes_per_host=2,
    memory_bytes=1e6,
    kv_link_bytes_per_second=1e3,
    prefill=PrefillConstants(
        gemm_flops=1e6,
        attention_flops=1e5,
        link_bytes_per_second=1e5,
        link_latency_seconds=1e-3,
        all_to_all_bytes_per_second=2e5,
        all_to_all_latency_seconds=5e-3,
        host_sum_bytes_per_second=1e6,
        sum_bytes_per_second=1e4,
        layer_overhead_seconds=0.1,
        rank_overhead_seconds=0.01,
        cached_overhead_seconds=0.001,
    ),
    decode=DecodeConstants(
        weight_bytes_per_second=1e5,
        kv_bytes_per_second=1e4,
        attention_seconds=0.02,
        free_rows=2,
        row_seconds=0.003,
        hop_seconds=0.01,
        all_to_all_seconds=0.05,
        ring_seconds=0.004,
        sum_seconds=0.007,
        host_seconds=0.002,
    ),
)
LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    element_bytes=2,
)


def prefill_rates(link: float, start: float = 20e-6) -> PrefillRates:
    return PrefillRates(
        ring=RingRates(
            gemm_flops=400e12, attention_flops=400e12, link_bytes_per_second=link, link_latency_seconds=start
        )
    )


def chain(num_ranks: int, link: float, start: float = 20e-6, **changes: Any) -> ChainRates:
    rates = ChainRates.of(LLAMA_8B, prefill_rates(link, start), (1.0,) * num_ranks)
    return replace(rates, **changes)

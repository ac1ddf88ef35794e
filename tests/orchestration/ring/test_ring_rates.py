"""Rates of a ring by those of its processes."""

from __future__ import annotations

from dataclasses import replace

from ringserve.orchestration.ring.life import rates_of_ring
from ringserve.views import RingRates

RATES = RingRates(gemm_flops=4e10, attention_flops=3e10, link_bytes_per_second=1e9, link_latency_seconds=1e-4)


def with_gemm(*flops: float) -> list[RingRates]:
    return [replace(RATES, gemm_flops=each) for each in flops]


def test_ranks_that_are_alike_have_the_rates_of_the_first() -> None:
    assert rates_of_ring(with_gemm(4e10, 3.5e10, 4.2e10), tp=1) == RATES


def test_unlike_ranks_have_the_rates_of_the_slowest_and_speeds_beside_it() -> None:
    found = rates_of_ring(with_gemm(4e10, 2e10, 3e10), tp=1)
    assert (found.gemm_flops, found.speeds) == (2e10, (2.0, 1.0, 1.5))


def test_the_slowest_process_of_a_rank_counts() -> None:
    assert rates_of_ring(with_gemm(4e10, 2e10, 4e10, 4e10), tp=2).speeds == (1.0, 2.0)


def test_ranks_of_one_host_are_alike_whatever_a_probe_beside_other_programs_said() -> None:
    on_one, on_two = ("a", "a"), ("a", "b")
    assert rates_of_ring(with_gemm(6e10, 2e10), 1, on_one) == replace(RATES, gemm_flops=2e10)
    assert rates_of_ring(with_gemm(6e10, 2e10), 1, on_two).speeds == (3.0, 1.0)
    found = rates_of_ring(with_gemm(6e10, 2e10, 6e10, 5e10), 1, ("a", "a", "b", "b"))
    assert (found.gemm_flops, found.speeds) == (2e10, (1.0, 1.0, 2.5, 2.5))
    assert rates_of_ring(with_gemm(6e10, 2e10, 6e10, 5e10), 2, ("a", "a", "b", "b")).speeds == (1.0, 2.5)

"""Rates that decide how decode steps are served, measured by the ring on itself at start, like `workers.rank.probe`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

import torch

from cp_core.attention.interface import AttentionBackend
from cp_core.cost.decode_variant import DecodeRates
from cp_core.cost.model import Rates
from cp_core.transport.interface import RingTransport
from workers.model.loading import DTYPES
from workers.protocol.steps import ModelInfo, RingRates

SECONDS_PER_RATE: Final = 0.05
# As many matrices in turn as a layer has of this size, so that one does not stay in a cache by itself.
WEIGHT_COPIES: Final = 3
STORED_TOKENS: Final = 1024
MESSAGES: Final = 40
MESSAGE_BYTES: Final = 64


def probe_decode_rates(
    rates: RingRates, info: ModelInfo, device: torch.device, backend: AttentionBackend, transport: RingTransport
) -> DecodeRates:
    """Measure this rank with one row, and messages between busy ranks. Collective."""
    dtype = DTYPES[info.dtype]
    row = torch.ones(1, info.hidden_size, dtype=dtype, device=device)
    weights = [
        torch.ones(info.intermediate_size, info.hidden_size, dtype=dtype, device=device) for _ in range(WEIGHT_COPIES)
    ]

    def multiply() -> None:
        for weight in weights:
            torch.nn.functional.linear(row, weight)

    q = torch.ones(1, info.num_heads, info.head_dim, dtype=dtype, device=device)
    kv = torch.ones(STORED_TOKENS, info.num_kv_heads, info.head_dim, dtype=dtype, device=device)
    multiply_seconds = _median_seconds(multiply, device)
    attend_seconds = _median_seconds(
        lambda: backend.partial_attention(q, kv, kv, causal=False, scale=info.head_dim**-0.5), device
    )
    lone_seconds = _lone_seconds(multiply, multiply_seconds, transport, device)
    weight_bytes = sum(weight.nbytes for weight in weights)
    return DecodeRates(
        ring=Rates(
            gemm_flops=rates.gemm_flops,
            attention_flops=rates.attention_flops,
            link_bytes_per_second=rates.link_bytes_per_second,
            link_latency_seconds=rates.link_latency_seconds,
            overlap=rates.overlap,
        ),
        weight_bytes_per_second=weight_bytes / multiply_seconds,
        lone_weight_bytes_per_second=weight_bytes / lone_seconds,
        kv_bytes_per_second=2 * kv.nbytes / attend_seconds,
        busy_message_seconds=_busy_message_seconds(multiply, multiply_seconds, transport, device),
    )


def _lone_seconds(
    compute: Callable[[], None], seconds_together: float, transport: RingTransport, device: torch.device
) -> float:
    """What the first rank takes while the others wait; they themselves, and a ring of one, answer what they know."""
    if transport.size == 1:
        return seconds_together
    word, answers = torch.zeros(1, device=device), list(torch.empty(transport.size, 1, device=device))
    transport.gather_all(word, answers).wait()
    seconds = _median_seconds(compute, device) if transport.rank == 0 else seconds_together
    transport.gather_all(word, answers).wait()
    # Ranks that share no memory would differ by chance alone: nobody gets slower by being alone.
    return min(seconds, seconds_together)


def _busy_message_seconds(
    compute: Callable[[], None], compute_seconds: float, transport: RingTransport, device: torch.device
) -> float:
    """What a small exchange adds to a little computing before it, on average: a decode step meets every delay."""
    if transport.size == 1:
        return 0.0
    send = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device=device)
    received = torch.empty_like(send)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    start = time.perf_counter()
    for _ in range(MESSAGES):
        compute()
        transport.exchange(send, after, received, before).wait()
    _finish(device)
    return max(0.0, (time.perf_counter() - start) / MESSAGES - compute_seconds)


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Of the runs that fit in SECONDS_PER_RATE, at least one."""
    run()
    _finish(device)
    seconds: list[float] = []
    deadline = time.perf_counter() + SECONDS_PER_RATE
    while not seconds or time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

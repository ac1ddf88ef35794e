"""What a ring can do, measured on itself at start: the cost model plans with these, not with data sheets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from cp_core.attention.interface import AttentionBackend
from cp_core.transport.interface import RingTransport
from workers.model.loading import DTYPES
from workers.protocol.steps import ModelInfo, RingRates

SECONDS_PER_RATE: Final = 0.06
GEMM_TOKENS: Final = 512
# One chunk's queries against a prefix: far from the ends where overheads or caches rule.
QUERY_TOKENS: Final = 512
STORED_TOKENS: Final = 1024
# Of one message: what a link carries in LINK_SECONDS, but not more than MOST and not less than LEAST.
LINK_SECONDS: Final = 0.1
MOST_LINK_BYTES: Final = 4 << 20
LEAST_LINK_BYTES: Final = 64 << 10
LINK_EXCHANGES: Final = 6
LATENCY_EXCHANGES: Final = 40
OVERLAP_EXCHANGES: Final = 5
MOST_OVERLAP_BYTES: Final = 64 << 20
# A ring of one sends nothing, and a model that divides by its rates must not meet infinity.
NO_LINK_BYTES_PER_SECOND: Final = 1e15


def probe_rates(
    info: ModelInfo, device: torch.device, backend: AttentionBackend, transport: RingTransport
) -> RingRates:
    """Measure this rank and its link to the next one. Collective: every rank calls it at the same time."""
    gemm = _gemm_flops(info, device)
    attend = _attention(info, device, backend)
    attention_seconds = _best_seconds(attend, device)
    attention = 4.0 * QUERY_TOKENS * STORED_TOKENS * info.num_heads * info.head_dim / attention_seconds
    if transport.size == 1:
        bandwidth, latency, overlap = NO_LINK_BYTES_PER_SECOND, 0.0, 1.0
    else:
        latency = _exchange_seconds(transport, 8, LATENCY_EXCHANGES, device)
        bandwidth = _link_bytes_per_second(transport, latency, device)
        overlap = _overlap(transport, attend, int(bandwidth * attention_seconds), device)
    return RingRates(
        gemm_flops=gemm,
        attention_flops=attention,
        link_bytes_per_second=bandwidth,
        link_latency_seconds=latency,
        overlap=overlap,
    )


def _gemm_flops(info: ModelInfo, device: torch.device) -> float:
    """FLOP/s of the model's widest linear layer."""
    dtype = DTYPES[info.dtype]
    tokens = torch.ones(GEMM_TOKENS, info.hidden_size, dtype=dtype, device=device)
    weight = torch.ones(info.intermediate_size, info.hidden_size, dtype=dtype, device=device)
    seconds = _best_seconds(lambda: torch.nn.functional.linear(tokens, weight), device)
    return 2.0 * GEMM_TOKENS * info.hidden_size * info.intermediate_size / seconds


def _attention(info: ModelInfo, device: torch.device, backend: AttentionBackend) -> Callable[[], object]:
    """Unmasked partial attention: 4 * T * S * H * D operations."""
    dtype = DTYPES[info.dtype]
    q = torch.ones(QUERY_TOKENS, info.num_heads, info.head_dim, dtype=dtype, device=device)
    k = torch.ones(STORED_TOKENS, info.num_kv_heads, info.head_dim, dtype=dtype, device=device)
    scale = info.head_dim**-0.5
    return lambda: backend.partial_attention(q, k, k, causal=False, scale=scale)


def _link_bytes_per_second(transport: RingTransport, latency: float, device: torch.device) -> float:
    """By messages that are as long as the slowest of all links carries in LINK_SECONDS: a ring over slow links starts
    almost as soon as others.
    """

    def rate(num_bytes: int, repeats: int) -> float:
        return num_bytes / max(1e-9, _exchange_seconds(transport, num_bytes, repeats, device) - latency)

    own = int(rate(LEAST_LINK_BYTES, 2) * LINK_SECONDS)
    common = _least_of_all(transport, max(LEAST_LINK_BYTES, min(own, MOST_LINK_BYTES)), device)
    return rate(common, LINK_EXCHANGES)


def _least_of_all(transport: RingTransport, own: int, device: torch.device) -> int:
    """Of every rank's number; collective."""
    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(transport.size)]
    transport.gather_all(torch.tensor([own], device=device), numbers).wait()
    return min(int(number) for number in numbers)


def _overlap(transport: RingTransport, attend: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """How much of the shorter of two works, a message and attention of about its length, vanishes behind the other.

    0 where the cores that attend must move the message as well, 1 where something else moves it. Every rank sends as
    much as the slowest of them can hide.
    """
    common = _least_of_all(transport, max(1, min(num_bytes, MOST_OVERLAP_BYTES)), device)
    message = _exchange_seconds(transport, common, OVERLAP_EXCHANGES, device)
    alone = _median_seconds(attend, OVERLAP_EXCHANGES, device)
    both = _exchange_seconds(transport, common, OVERLAP_EXCHANGES, device, meanwhile=attend)
    return min(1.0, max(0.0, (message + alone - both) / min(message, alone)))


def _median_seconds(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[repeats // 2]


def _exchange_seconds(
    transport: RingTransport,
    num_bytes: int,
    repeats: int,
    device: torch.device,
    meanwhile: Callable[[], object] = lambda: None,
) -> float:
    """Median time to send `num_bytes` to the next rank while receiving as much from the one before, and computing."""
    send = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    recv = torch.empty_like(send)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        under_way = transport.exchange(send, after, recv, before)
        meanwhile()
        under_way.wait()
        _finish(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]


def _best_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Shortest of the runs that fit in SECONDS_PER_RATE: whatever else the machine does only ever adds time."""
    run()
    _finish(device)
    best, deadline = float("inf"), time.perf_counter() + SECONDS_PER_RATE
    while True:
        start = time.perf_counter()
        run()
        _finish(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= deadline:
            return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

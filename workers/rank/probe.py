"""Ring rates, measured by its ranks at start: the cost models plan with them, not with data sheets.

`probe_rates` measures prefill, `probe_decode_rates` decode. Both are collective: every rank calls them together. They
yield between parts of some 0.1 s, so that decode steps come between them; `finished` does all parts without such a
break. A rank's worker runs them at start or in its decode loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Linear, Parameter

from ringserve.cp_core.attention.partial import AttentionBackend, PagedBackend, PagedShards, attend_pages, takes_pages
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.cost.decode import DecodeRates
from ringserve.cp_core.layout.step_plans import RowIndices
from ringserve.cp_core.transport.interface import RingTransport
from ringserve.views import RingRates
from ringserve.workers.model.layers import pack
from ringserve.workers.model.loading import DTYPES
from ringserve.workers.protocol.ranks import ModelInfo

T = TypeVar("T")

SECONDS_PER_RATE: Final = 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSizes:
    """Sizes of the measured work: tokens of a matrix product, and queries of a chunk that attends `stored_tokens`.

    In decode, one query attends at least `decode_tokens` and at least `decode_bytes` of K and V. All are far from the
    sizes where the start of a call or a cache dominates.
    """

    gemm_tokens: int
    query_tokens: int
    stored_tokens: int
    decode_tokens: int
    decode_bytes: int


CPU_SIZES: Final = ProbeSizes(gemm_tokens=512, query_tokens=512, stored_tokens=1024, decode_tokens=1024, decode_bytes=0)
# To start a call and wait for it takes some 20 us, and the cache of an H100 holds 50 MB.
GPU_SIZES: Final = ProbeSizes(
    gemm_tokens=4096, query_tokens=4096, stored_tokens=8192, decode_tokens=1024, decode_bytes=256 << 20
)
# Size of one message: the bytes that a link carries in LINK_SECONDS, from LEAST_LINK_BYTES to MOST_LINK_BYTES.
LINK_SECONDS: Final = 0.1
MOST_LINK_BYTES: Final = 4 << 20
LEAST_LINK_BYTES: Final = 64 << 10
LINK_EXCHANGES: Final = 6
LATENCY_EXCHANGES: Final = 40
OVERLAP_EXCHANGES: Final = 5
MOST_OVERLAP_BYTES: Final = 64 << 20
# A ring of one sends nothing, but cost models divide by this rate and need a finite number.
NO_LINK_BYTES_PER_SECOND: Final = 1e15

DECODE_SECONDS_PER_RATE: Final = 0.05
# The matrices multiplied in turn have together the model's size, but about this at most: then none stays in a cache.
WEIGHTS_BYTES: Final = 96 << 20
LAYERS_A_PART: Final = 8
# Number of windows in which all ranks compute, each followed by one in which only the first rank does.
SHARING_WINDOWS: Final = 3
SHARING_SECONDS: Final = 0.04
# If a lone rank is faster by less than this factor, ranks share nothing: with cores of their own they differ by less.
LEAST_SHARING: Final = 1.15
BUSY_MESSAGES: Final = 40
BUSY_MESSAGE_BYTES: Final = 64


def sizes_on(device: torch.device, backend: AttentionBackend) -> ProbeSizes:
    """Return the sizes of a device's measurements. The reference backend gets small ones: it holds all scores."""
    return GPU_SIZES if device.type == "cuda" and backend.name != ReferenceAttention.name else CPU_SIZES


def finished(measurement: Generator[None, None, T]) -> T:
    """Do all parts of a measurement; return its result."""
    while True:
        try:
            next(measurement)
        except StopIteration as end:
            result: T = end.value
            return result


def probe_rates(
    info: ModelInfo, device: torch.device, backend: AttentionBackend, transport: RingTransport
) -> Generator[None, None, RingRates]:
    """Measure prefill on this rank, and its link to the next rank."""
    sizes = sizes_on(device, backend)
    multiply = _product(info, device, sizes.gemm_tokens)
    multiply_seconds = min(_times_within(SECONDS_PER_RATE, multiply, device))
    yield
    attend = _attention(info, device, backend, sizes.query_tokens, sizes.stored_tokens)
    attention_seconds = min(_times_within(SECONDS_PER_RATE, attend, device))
    yield
    attention = 4.0 * sizes.query_tokens * sizes.stored_tokens * info.num_heads * info.head_dim / attention_seconds
    if transport.size == 1:
        bandwidth, latency, overlap, sharing = NO_LINK_BYTES_PER_SECOND, 0.0, 1.0, NO_SHARING
    else:
        sharing = _sharing(multiply, transport, device)
        yield
        latency = _exchange_seconds(transport, 8, LATENCY_EXCHANGES, device)
        bandwidth = _link_bytes_per_second(transport, latency, device)
        yield
        overlap = _overlap(transport, attend, int(bandwidth * attention_seconds), device)
    return RingRates(
        gemm_flops=_product_flops(info, sizes.gemm_tokens) / multiply_seconds / sharing.slowdown,
        attention_flops=attention / sharing.slowdown,
        link_bytes_per_second=bandwidth,
        link_latency_seconds=latency,
        overlap=overlap,
        lone_speed=sharing.lone_speed,
    )


def probe_decode_rates(
    rates: RingRates,
    info: ModelInfo,
    device: torch.device,
    backend: AttentionBackend,
    transport: RingTransport,
    block_tokens: int,
) -> Generator[None, None, DecodeRates]:
    """Measure decode on this rank with one row, by the kernel that serves it, and messages between busy ranks."""
    row = torch.ones(1, info.hidden_size, dtype=DTYPES[info.dtype], device=device)
    layer_bytes = info.intermediate_size * info.hidden_size * info.element_bytes
    weights_bytes = min(WEIGHTS_BYTES, info.num_parameters * info.element_bytes)
    layers: list[Linear] = []
    while len(layers) * layer_bytes < weights_bytes:
        if layers and len(layers) % LAYERS_A_PART == 0:
            yield
        layers.append(_linear(info, device))
    yield

    def multiply() -> None:
        for layer in layers:
            layer(row)

    multiply_seconds = _decode_seconds(multiply, device)
    yield
    token_bytes = 2 * info.num_kv_heads * info.head_dim * info.kv_element_bytes
    sizes = sizes_on(device, backend)
    # Whole blocks, as a table has them.
    stored_tokens = -(-max(sizes.decode_tokens, sizes.decode_bytes // token_bytes) // block_tokens) * block_tokens
    if takes_pages(backend, block_tokens):
        attend = _paged_attention(info, device, backend, stored_tokens, block_tokens)
    else:
        attend = _attention(info, device, backend, 1, stored_tokens)
    attend_seconds = _decode_seconds(attend, device)
    yield
    lone_seconds = _lone_seconds(multiply, multiply_seconds, transport, device)
    weight_bytes = len(layers) * layer_bytes
    return DecodeRates(
        ring=rates,
        weight_bytes_per_second=weight_bytes / multiply_seconds,
        lone_weight_bytes_per_second=weight_bytes / lone_seconds,
        kv_bytes_per_second=stored_tokens * token_bytes / attend_seconds,
        busy_message_seconds=_busy_message_seconds(lambda: layers[0](row), transport, device),
    )


# --- computation -----------------------------------------------------------------------------------------------------


def _product(info: ModelInfo, device: torch.device, num_tokens: int) -> Callable[[], object]:
    """Return a function that runs the model's widest linear layer, in `_product_flops` operations."""
    tokens = _numbers((num_tokens, info.hidden_size), DTYPES[info.dtype], device)
    layer = _linear(info, device)
    return lambda: layer(tokens)


def _product_flops(info: ModelInfo, num_tokens: int) -> float:
    return 2.0 * num_tokens * info.hidden_size * info.intermediate_size


def _linear(info: ModelInfo, device: torch.device) -> Linear:
    """Return a layer of the size and kind of the model's widest."""
    dtype = DTYPES[info.dtype]
    # Without `skip_init`, which imports sympy to move a layer to a device, which took every rank 0.6 s.
    layer = Linear(info.hidden_size, info.intermediate_size, bias=False, dtype=dtype, device="meta")
    layer.weight = Parameter(torch.ones(layer.weight.shape, dtype=dtype, device=device), requires_grad=False)
    pack(layer)
    return layer


def _attention(
    info: ModelInfo, device: torch.device, backend: AttentionBackend, tokens: int, stored_tokens: int
) -> Callable[[], object]:
    """Return a function for unmasked attention of T `tokens` to S `stored_tokens`: 4 * T * S * H * D operations."""
    dtype = DTYPES[info.kv_dtype]
    q = _numbers((tokens, info.num_heads, info.head_dim), dtype, device)
    k = _numbers((stored_tokens, info.num_kv_heads, info.head_dim), dtype, device)
    scale = info.head_dim**-0.5
    return lambda: backend.partial_attention(q, k, k, causal=False, scale=scale)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random numbers. Ones would be too fast: kernels need fewer products for numbers of few bits."""
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=torch.Generator(device).manual_seed(0))


def _paged_attention(
    info: ModelInfo, device: torch.device, backend: PagedBackend, stored_tokens: int, block_tokens: int
) -> Callable[[], object]:
    """Return a function in which one query attends `stored_tokens` by a kernel that reads block tables."""
    dtype, num_blocks = DTYPES[info.kv_dtype], stored_tokens // block_tokens
    q = torch.ones(1, info.num_heads, info.head_dim, dtype=dtype, device=device)
    k, v = torch.ones(2, num_blocks, block_tokens, info.num_kv_heads, info.head_dim, dtype=dtype, device=device)
    table = torch.randperm(num_blocks, device=device).to(torch.int32)[None]
    lengths = torch.full((1,), stored_tokens, dtype=torch.int32, device=device)
    shards, scale, indices = PagedShards(k, v, table, (stored_tokens,), lengths), info.head_dim**-0.5, RowIndices()
    return lambda: attend_pages(backend, q, shards, scale, indices)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sharing:
    """Effect of computing together: a rank is `lone_speed` times as fast while the others wait.

    While all ranks compute, a run takes on average `slowdown` times as long as the shortest one.
    """

    lone_speed: float
    slowdown: float


NO_SHARING: Final = _Sharing(lone_speed=1.0, slowdown=1.0)


def _sharing(compute: Callable[[], object], transport: RingTransport, device: torch.device) -> _Sharing:
    """Measure how ranks share processors. All ranks return the same. Collective.

    The mean run of a window counts, since the shortest run may tell nothing: ranks that share a core take turns on it,
    and most of their runs take as long as those of a lone rank. Of all windows the one with the least sharing counts,
    since other work that comes and goes makes ranks look as if they shared.
    """
    found = []
    _gathered((0.0, 0.0), transport, device)  # all begin at the same time
    for _ in range(SHARING_WINDOWS):
        times = _times_within(SHARING_SECONDS, compute, device)
        mean = statistics.fmean(times)
        each = _gathered((1.0 / mean, mean / min(times)), transport, device)
        lone = _times_within(SHARING_SECONDS, compute, device) if transport.rank == 0 else [1.0]
        ((alone, _), *_) = _gathered((1.0 / statistics.fmean(lone), 0.0), transport, device)
        lone_speed = alone / statistics.fmean(rate for rate, _ in each)
        slowdown = statistics.fmean(slower for _, slower in each)
        found.append(_Sharing(lone_speed=min(lone_speed, float(transport.size)), slowdown=slowdown))
    least = min(found, key=lambda each: each.lone_speed)
    return least if least.lone_speed >= LEAST_SHARING else NO_SHARING


def _gathered(own: tuple[float, float], transport: RingTransport, device: torch.device) -> list[tuple[float, float]]:
    """Return the two numbers of every rank; no rank goes on before all ranks have called."""
    numbers = list(torch.empty(transport.size, 2, device=device))
    transport.gather_all(torch.tensor(own, device=device), numbers).wait()
    return [(float(first), float(second)) for first, second in numbers]


def _decode_seconds(run: Callable[[], object], device: torch.device) -> float:
    return statistics.median(_times_within(DECODE_SECONDS_PER_RATE, run, device))


def _lone_seconds(
    compute: Callable[[], None], seconds_together: float, transport: RingTransport, device: torch.device
) -> float:
    """Measure `compute` on the first rank while the others wait; other ranks return `seconds_together`."""
    if transport.size == 1:
        return seconds_together
    word, answers = torch.zeros(1, device=device), list(torch.empty(transport.size, 1, device=device))
    transport.gather_all(word, answers).wait()
    seconds = _decode_seconds(compute, device) if transport.rank == 0 else seconds_together
    transport.gather_all(word, answers).wait()
    # No rank gets slower by being alone: a longer time is chance, as between ranks that share no memory.
    return min(seconds, seconds_together)


# --- messages --------------------------------------------------------------------------------------------------------


def _link_bytes_per_second(transport: RingTransport, latency: float, device: torch.device) -> float:
    """Measure the link with messages that the slowest of all links carries in LINK_SECONDS.

    So a ring over slow links starts almost as soon as others.
    """

    def rate(num_bytes: int, repeats: int) -> float:
        return num_bytes / max(1e-9, _exchange_seconds(transport, num_bytes, repeats, device) - latency)

    own = int(rate(LEAST_LINK_BYTES, 2) * LINK_SECONDS)
    common = _least_of_all(transport, max(LEAST_LINK_BYTES, min(own, MOST_LINK_BYTES)), device)
    return rate(common, LINK_EXCHANGES)


def _least_of_all(transport: RingTransport, own: int, device: torch.device) -> int:
    """Return the smallest of the ranks' numbers; collective."""
    numbers = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(transport.size)]
    transport.gather_all(torch.tensor([own], device=device), numbers).wait()
    return min(int(number) for number in numbers)


def _overlap(transport: RingTransport, attend: Callable[[], object], num_bytes: int, device: torch.device) -> float:
    """Measure how much of the shorter of two tasks, a message and attention of about its length, the other hides.

    0 if the cores that attend must move the message as well, 1 if other hardware moves it. Every rank sends the
    least that any rank's link carries during its attention.
    """
    common = _least_of_all(transport, max(1, min(num_bytes, MOST_OVERLAP_BYTES)), device)
    message = _exchange_seconds(transport, common, OVERLAP_EXCHANGES, device)
    alone = _upper_median([_seconds(attend, device) for _ in range(OVERLAP_EXCHANGES)])
    both = _exchange_seconds(transport, common, OVERLAP_EXCHANGES, device, meanwhile=attend)
    return min(1.0, max(0.0, (message + alone - both) / min(message, alone)))


def _busy_message_seconds(compute: Callable[[], object], transport: RingTransport, device: torch.device) -> float:
    """Measure a small exchange after `compute`, including the wait for ranks whose `compute` takes longer.

    The lower quartile counts: while a ring starts, other processes of its host start too, and every second exchange
    may wait for a processor that will be free when the ring serves.
    """
    if transport.size == 1:
        return 0.0
    exchange = _exchange(transport, BUSY_MESSAGE_BYTES, device)
    seconds = []
    for _ in range(BUSY_MESSAGES):
        compute()
        seconds.append(_seconds(exchange, device))
    return sorted(seconds)[BUSY_MESSAGES // 4]


def _exchange_seconds(
    transport: RingTransport,
    num_bytes: int,
    repeats: int,
    device: torch.device,
    meanwhile: Callable[[], object] = lambda: None,
) -> float:
    """Measure the median time of an exchange of `num_bytes` with both neighbours, with a computation meanwhile."""
    exchange = _exchange(transport, num_bytes, device, meanwhile)
    return _upper_median([_seconds(exchange, device) for _ in range(repeats)])


def _exchange(
    transport: RingTransport, num_bytes: int, device: torch.device, meanwhile: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Return a function that sends `num_bytes` to the next rank and receives as much from the previous one."""
    send = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    received = torch.empty_like(send)
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size

    def run() -> None:
        under_way = transport.exchange(send, after, received, before)
        meanwhile()
        under_way.wait()

    return run


# --- clock -----------------------------------------------------------------------------------------------------------


def _times_within(budget: float, run: Callable[[], object], device: torch.device) -> list[float]:
    """Time the runs that fit in `budget` seconds, at least one, after one run that is not counted."""
    _seconds(run, device)
    times: list[float] = []
    deadline = time.perf_counter() + budget
    while not times or time.perf_counter() < deadline:
        times.append(_seconds(run, device))
    return times


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _upper_median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]

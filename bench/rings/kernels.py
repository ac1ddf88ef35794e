"""`python -m bench attention --device`: the kernels of one device, each beside the others for the same work there.

Prefill attention, decode attention over scattered blocks, linear layers on CPUs, merge of parts and sampling, with the
shapes of a layer and a vocabulary. Shapes: T query tokens, S stored tokens, B sequences, H query heads, K KV heads, D
head dimension.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.report import Figure, Row
from bench.rings.attention import AttentionShape
from ringserve.cp_core.attention import native
from ringserve.cp_core.attention.backends import BACKENDS, select_backend
from ringserve.cp_core.attention.flash_attn import FlashAttention
from ringserve.cp_core.attention.partial import (
    AttentionBackend,
    PagedShards,
    Partial,
    attend_band,
    attend_pages,
    merge,
    takes_pages,
)
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.step_plans import Band, KvRun, RowIndices, Rows
from ringserve.services.offline.terminal import Tell
from ringserve.workers.model.layers import PACKED_ROWS, packed_dtypes, with_least_rows
from ringserve.workers.sampling.parameters import SamplingParameters
from ringserve.workers.sampling.sampler import RowSampler, sample_rows

PAGE_TOKENS = 16
# Copy, prefill, windows, decode, linear layers, merge and sampling.
NUM_KINDS = 7
# Calls of one measurement, so that reading the clock does not weigh in it.
CALLS = 5
COPIED_BYTES = 1 << 30
# Rows up to which a product is bound by the bytes of its weights.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """Cases of a run: (T, S, is causal) of prefill, (B, S) of decode, (rows, parts) of merges, vocabulary.

    `windows` has (T, tokens of the window) of causal prefill.
    `linear` has the rows that are multiplied by weights of `linear_bytes` in matrices of `linear_features` in and out.
    """

    prefill: tuple[tuple[int, int, bool], ...]
    decode: tuple[tuple[int, int], ...]
    merges: tuple[tuple[int, int], ...]
    vocabulary: int
    copied_bytes: int = COPIED_BYTES
    windows: tuple[tuple[int, int], ...] = ()
    linear: tuple[int, ...] = ()
    linear_features: tuple[int, int] = (576, 1536)
    linear_bytes: int = 256 << 20


GPU_SIZES = Sizes(
    prefill=(
        (8192, 8192, True),
        (16384, 16384, True),
        (8192, 65536, False),
        (2048, 131072, False),
        (128, 131072, False),
    ),
    decode=((1, 512), (1, 8192), (1, 131072), (8, 32768), (32, 8192)),
    merges=((8192, 2), (8192, 8), (16, 4)),
    vocabulary=128_256,
    windows=((8192, 8192), (8192, 1024), (32768, 4096)),
)
CPU_SIZES = Sizes(
    prefill=((512, 512, True), (2048, 2048, True), (3072, 6144, False), (64, 6144, False)),
    decode=((1, 512), (1, 6000), (8, 512)),
    merges=((2048, 2), (16, 4)),
    vocabulary=49_152,
    windows=((2048, 512),),
    linear=(1, 4, 8, 16, 64, 512),
)


def kernel_row(what: str, case: str, kernel: str, seconds: float, rate: float, unit: str) -> Row:
    """Return the row of a kernel: the median seconds of one call, and the rate of its operations or bytes."""
    figures: dict[str, Figure] = {"milliseconds": 1e3 * seconds, "rate": rate, "unit": unit}
    return Row(keys={"what": what, "case": case, "kernel": kernel}, figures=figures)


def measure_kernels(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, sizes: Sizes, num_rounds: int, tell: Tell
) -> list[Row]:
    """Measure every case with every fast backend that serves the device. Raises ConfigError if there is no GPU.

    `tell` hears of each of NUM_KINDS kinds of measurements.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: 'cuda', but torch finds no GPU here; without --device rings are measured on CPUs")
    names = [kind.name for kind in BACKENDS if kind.is_fast and kind.supports(device, dtype)]
    if FlashAttention.supports(device, dtype) and importlib.util.find_spec("flash_attn") is not None:
        names.append(FlashAttention.name)
    backends = [select_backend(name, device, dtype) for name in names]
    bench = KernelBench(shape, device, dtype, backends, num_rounds)
    figures: list[Row] = []
    with torch.inference_mode():
        for measure in (
            bench.copy,
            bench.prefill,
            bench.windows,
            bench.decode,
            bench.linear,
            bench.merge,
            bench.sampling,
        ):
            figures += measure(sizes)
            tell(measure.__name__)
    return figures


class KernelBench:
    """Cases of one shape on one device. Inputs are random, the same for all kernels of a case."""

    def __init__(
        self,
        shape: AttentionShape,
        device: torch.device,
        dtype: torch.dtype,
        backends: list[AttentionBackend],
        num_rounds: int,
    ) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._backends = backends
        self._num_rounds = num_rounds

    def copy(self, sizes: Sizes) -> Iterator[Row]:
        """Measure a copy in the device's memory: the ceiling of decode and merge."""
        source = torch.empty(sizes.copied_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        seconds = self._seconds(lambda: target.copy_(source))
        rate, unit = _bytes_rate(2 * sizes.copied_bytes, seconds)
        yield kernel_row("copy", f"{sizes.copied_bytes:,} bytes", "torch", seconds, rate, unit)

    def prefill(self, sizes: Sizes) -> Iterator[Row]:
        heads, scale = self._shape.num_heads, self._shape.head_dim**-0.5
        for tokens, stored, causal in sizes.prefill:
            q = self._draw(tokens, heads)
            k, v = (self._draw(stored, self._shape.num_kv_heads) for _ in range(2))
            flops = 4.0 * tokens * stored * heads * self._shape.head_dim / (2 if causal else 1)
            for backend in self._backends:
                seconds = self._seconds(partial(backend.partial_attention, q, k, v, causal=causal, scale=scale))
                case = f"{tokens:,} x {stored:,} {'causal' if causal else 'full'}"
                yield kernel_row("prefill", case, backend.name, seconds, flops / seconds / 1e12, "TFLOP/s")

    def windows(self, sizes: Sizes) -> Iterator[Row]:
        """Measure prefill under a window by each backend; operations count for pairs of tokens that see each other."""
        heads, scale = self._shape.num_heads, self._shape.head_dim**-0.5
        for tokens, window in sizes.windows:
            q = self._draw(tokens, heads)
            keys = KvRun(*(self._draw(tokens, self._shape.num_kv_heads) for _ in range(2)))
            at = np.arange(tokens)
            band = Band(Rows(0, tokens), np.maximum(at - window + 1, 0), at + 1)
            flops = 4.0 * float((band.stop - band.first).sum()) * heads * self._shape.head_dim
            for backend in self._backends:
                seconds = self._seconds(partial(attend_band, backend, q, keys, band, scale))
                case = f"{tokens:,} x {window:,}"
                yield kernel_row("window", case, backend.name, seconds, flops / seconds / 1e12, "TFLOP/s")

    def decode(self, sizes: Sizes) -> Iterator[Row]:
        """Measure decode over blocks of PAGE_TOKENS in random order, by the kernels that follow block tables."""
        for batch, stored in sizes.decode:
            shards = self._scattered(batch, stored)
            q, indices = self._draw(batch, self._shape.num_heads), RowIndices()
            scale = self._shape.head_dim**-0.5
            num_bytes = 2 * batch * stored * self._shape.num_kv_heads * self._shape.head_dim * self._dtype.itemsize
            for backend in self._backends:
                if takes_pages(backend, PAGE_TOKENS):
                    seconds = self._seconds(partial(attend_pages, backend, q, shards, scale, indices))
                    yield kernel_row(
                        "decode", f"{batch} x {stored:,}", backend.name, seconds, *_bytes_rate(num_bytes, seconds)
                    )

    def linear(self, sizes: Sizes) -> Iterator[Row]:
        """Measure linear layers of a CPU: torch's kernel, oneDNN's with packed weights if it packs them here, and ours.

        Matrices are multiplied in turn, so that none stays in a cache. `native_bfloat16` has fp32 rows, and weights of
        which each number is a bfloat16; `native_alone` multiplies many rows as it multiplies few.
        """
        num_in, num_out = sizes.linear_features
        dtype, is_wide = self._dtype, self._dtype == torch.float32
        count = -(-sizes.linear_bytes // (dtype.itemsize * num_in * num_out))
        weights = [torch.randn(num_out, num_in).to(dtype) for _ in range(count)]
        forms: dict[str, tuple[list[torch.Tensor], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
            "torch": (weights, torch.nn.functional.linear)
        }
        if dtype in packed_dtypes():
            forms["onednn"] = (
                [torch.ops.mkldnn._reorder_linear_weight(each, PACKED_ROWS if is_wide else None) for each in weights],
                lambda rows, packed: torch.ops.mkldnn._linear_pointwise(
                    with_least_rows(rows, packed), packed, None, "none", [], ""
                ),
            )
        if native.library() is not None:
            forms["native"] = (
                [native.pack_weight(each) for each in weights],
                lambda rows, packed: native.multiply(rows, packed, num_out),
            )
            if is_wide:
                forms["native_bfloat16"] = [native.pack_weight(each.bfloat16()) for each in weights], forms["native"][1]
            forms["native_alone"] = forms["native"][0], native.rows_alone()(forms["native"][1])
        numbers = num_in * num_out * len(weights)
        for count in sizes.linear:
            rows = torch.randn(count, num_in).to(dtype)
            for name, (packed, compute) in forms.items():
                seconds = self._seconds(partial(_each, compute, rows, packed))
                rate = 2.0 * count * numbers / seconds / 1e12, "TFLOP/s"
                if count <= FEW_ROWS:
                    rate = _bytes_rate(numbers * (2 if name == "native_bfloat16" else dtype.itemsize), seconds)
                yield kernel_row("linear", f"{count} rows of {num_in} -> {num_out}", name, seconds, *rate)

    def merge(self, sizes: Sizes) -> Iterator[Row]:
        heads, head_dim = self._shape.num_heads, self._shape.head_dim
        for rows, count in sizes.merges:
            parts = [
                Partial(self._draw(rows, heads).float(), torch.randn(rows, heads, device=self._device))
                for _ in range(count)
            ]
            seconds = self._seconds(partial(merge, parts))
            num_bytes = 4 * rows * heads * (head_dim + 1) * (count + 1)
            yield kernel_row(
                "merge", f"{rows:,} rows, {count} parts", "merge", seconds, *_bytes_rate(num_bytes, seconds)
            )

    def sampling(self, sizes: Sizes) -> Iterator[Row]:
        """Measure the choice of tokens and its read by the host, for 1 and 16 rows."""
        kinds = {
            "greedy": SamplingParameters(),
            "drawn": SamplingParameters(temperature=1.0),
            "top_p": SamplingParameters(temperature=1.0, top_p=0.9),
        }
        for count in (1, 16):
            logits = torch.randn(count, sizes.vocabulary, device=self._device)
            for name, sampling in kinds.items():
                rows = [_Row(RowSampler(sampling), position) for position in range(count)]
                seconds = self._seconds(partial(sample_rows, rows, logits))
                yield kernel_row("sampling", f"{count} rows", name, seconds, count / seconds, "tokens/s")

    def _draw(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self._shape.head_dim, device=self._device, dtype=self._dtype)

    def _scattered(self, batch: int, stored: int) -> PagedShards:
        pages = -(-stored // PAGE_TOKENS)
        order = torch.randperm(batch * pages, device=self._device).to(torch.int32)
        k, v = (
            self._draw(batch * pages * PAGE_TOKENS, self._shape.num_kv_heads).view(
                batch * pages, PAGE_TOKENS, self._shape.num_kv_heads, self._shape.head_dim
            )
            for _ in range(2)
        )
        lengths = torch.full((batch,), stored, dtype=torch.int32, device=self._device)
        return PagedShards(k, v, order.view(batch, pages), (stored,) * batch, lengths)

    def _seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call, measured by events of the device if it has them."""
        for _ in range(3):  # the first calls compile and allocate
            call()
        return median(self._timed(call) for _ in range(self._num_rounds)) / CALLS

    def _timed(self, call: Callable[[], object]) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            return time.perf_counter() - began
        began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began_at.record()
        for _ in range(CALLS):
            call()
        ended_at.record()
        ended_at.synchronize()
        return float(began_at.elapsed_time(ended_at)) / 1e3


@dataclass(slots=True)
class _Row:
    sampler: RowSampler
    next_position: int


def _each(
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, weights: list[torch.Tensor]
) -> None:
    for weight in weights:
        compute(rows, weight)


def _bytes_rate(num_bytes: int, seconds: float) -> tuple[float, str]:
    return num_bytes / seconds / 1e12, "TB/s"

"""CPU kernels (`native.cpp`), compiled when ringserve is installed: attention, decoder layers, choice of tokens.

Layers, steps and samplers of ranks on CPUs call them.

Shapes: T query tokens, S stored tokens, B single queries, H query heads, K key/value heads, D head dimension, C input
features, N output features, R rows of logits, V tokens of the vocabulary.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial, empty_partial
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash
from ringserve.cp_core.layout.step_plans import KvRun

VERSION = 11
"""Version of the libraries' functions: a library of another version is not called."""

DTYPES = (torch.float32, torch.bfloat16)
CHOSEN_DTYPES = (*DTYPES, torch.float64)
HEAD_DIMS = frozenset({16, 32, 48, 64, 80, 96, 112, 128, 192, 256})
MAX_GROUP = 96
"""Maximum query heads per KV head."""

NUMBERS_PER_LINE = 32
"""How many bfloat16 numbers fill a cache line. Each tensor in a layer's working memory begins at a multiple of it."""

# Up to this many query tokens, each one reads the keys in place. With more, it pays to transpose the keys first.
MAX_SINGLE_TOKENS = 8


class Layer(ctypes.Structure):
    """Addresses of a decoder layer's packed weights and norms (0: none), and their sizes; the caller keeps the tensors.

    `joined` are the projections of queries, keys and values. `q_norm` and `k_norm` are norms of each head. The four
    types are codes of `types_of`.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("norm", "joined", "joined_bias", "q_norm", "k_norm", "out", "out_bias")),
        *((name, ctypes.c_void_p) for name in ("mlp_norm", "gate", "up", "down", "down_bias")),
        *((name, ctypes.c_int64) for name in ("features", "heads", "kv_heads", "dim", "middle", "is_wide")),
        *((name, ctypes.c_int64) for name in ("joined_types", "out_types", "gate_types", "down_types")),
        *((name, ctypes.c_float) for name in ("norm_epsilon", "q_epsilon", "k_epsilon", "mlp_epsilon")),
    ]
    features: int
    heads: int
    kv_heads: int
    dim: int
    middle: int


class _Piece(ctypes.Structure):
    _fields_: ClassVar = [("slots", ctypes.c_void_p), ("start", ctypes.c_int64), ("tokens", ctypes.c_int64)]


class _Sequence(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("pieces", "low", "high")),
        *((name, ctypes.c_int64) for name in ("cached", "rows")),
    ]


class _OwnRows(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "slots", "table", "lengths")),
        *((name, ctypes.c_int64) for name in ("columns", "page", "longest")),
        *((name, ctypes.c_void_p) for name in ("sequences", "copies")),
        ("count", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Slots of a layer's cache where T rows are stored, and each row's own list of pages to attend, with its own KV.

    k and v[S, K, D] are the cache's, slots is int64[T], table int32[T, M] lists each row's pages of `page_tokens`
    slots, and lengths int32[T] how many of their slots are filled, at most `longest`.
    """

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    page_tokens: int
    longest: int
    copied: ClassVar[int] = 0  # tokens whose KV is copied first

    def memory(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numbers, dtype=dtype)

    def _own(self, scale: float, copies: int) -> _OwnRows:
        given = (self.k, self.v, self.slots, self.table, self.lengths)
        sizes = self.table.shape[1], self.page_tokens, self.longest
        return _OwnRows(*(each.data_ptr() for each in given), *sizes, scale=scale)


class PromptSequences:
    """Sequences whose next tokens a prompt's step computes, packed: the same for all layers.

    `cached` lists the pieces of each sequence's cached tokens: (first slot, number of tokens), or a tensor of int64
    slots. KV in such slots is copied together before it is attended, one sequence at a time, at most `copied` tokens.
    """

    def __init__(self, cached: Sequence[Sequence[tuple[int, int] | torch.Tensor]], num_new: Sequence[int]) -> None:
        self._memory: list[object] = []  # whose addresses the kernels get
        each = []
        for pieces, rows in zip(cached, num_new, strict=True):
            made = (_Piece * len(pieces))(
                *(
                    _Piece(piece.data_ptr(), 0, len(piece)) if isinstance(piece, torch.Tensor) else _Piece(None, *piece)
                    for piece in pieces
                )
            )
            bounds = _seen(rows, sum(piece.tokens for piece in made))
            self._memory += [pieces, made, bounds]
            each.append(_Sequence(ctypes.addressof(made), *(bound.data_ptr() for bound in bounds), len(made), rows))
        self.each = (_Sequence * len(each))(*each)
        self.copied = max(
            (sum(len(piece) for piece in pieces if isinstance(piece, torch.Tensor)) for pieces in cached), default=0
        )
        self._scratch = torch.empty(0)

    def scratch(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Return working memory that all layers share: each layer's own would go back to the system after it."""
        if self._scratch.numel() < numbers or self._scratch.dtype != dtype:
            self._scratch = torch.empty(numbers, dtype=dtype)
        return self._scratch


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Slots int64[T] of a layer's cache, k and v[S, K, D], where T rows of some sequences are stored."""

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor
    sequences: PromptSequences

    @property
    def copied(self) -> int:
        return self.sequences.copied

    def memory(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        return self.sequences.scratch(numbers, dtype)

    def _own(self, scale: float, copies: int) -> _OwnRows:
        k, v, slots = (each.data_ptr() for each in (self.k, self.v, self.slots))
        listed = self.sequences.each
        sequences = {"sequences": ctypes.addressof(listed), "copies": copies, "count": len(listed)}
        return _OwnRows(k, v, slots, **sequences, scale=scale)


OwnRows = PagedRows | PromptRows
"""Rows of a step that this process alone stores and attends."""


@cache
def library() -> ctypes.CDLL | None:
    """Return the library for this machine's processor, or None if there is none that fits."""
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return load(capability if capability in ("avx512", "avx2") else "default")


def load(kind: str) -> ctypes.CDLL | None:
    """Load the library for an instruction set. Return None if it does not exist or is not of VERSION."""
    return load_file(Path(__file__).with_name(f"native-{kind}.so"))


def load_file(path: Path) -> ctypes.CDLL | None:
    """Load a compiled library. Return None if it does not exist or is not of VERSION.

    Kernels run on torch's thread pool, since a second pool would compete with it.
    """
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    if found.ringserve_version() != VERSION:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    found.ringserve_attend.argtypes = [*[pointer] * 7, ctypes.c_float, *[ctypes.c_int] * 3]
    found.ringserve_attend_pages.argtypes = [*[pointer] * 9, ctypes.c_float, ctypes.c_int, ctypes.c_int]
    found.ringserve_merge.argtypes = [*[pointer] * 4, *[integer] * 3, ctypes.c_int, ctypes.c_int]
    found.ringserve_pack.argtypes = [pointer, pointer, integer, integer, ctypes.c_int, ctypes.c_int]
    found.ringserve_linear.argtypes = [*[pointer] * 5, *[integer] * 3, *[ctypes.c_int] * 3]
    found.ringserve_normalize.argtypes = [*[pointer] * 3, integer, integer, ctypes.c_float, ctypes.c_int, ctypes.c_int]
    found.ringserve_rotate.argtypes = [*[pointer] * 5, ctypes.c_int, ctypes.c_int]
    layer = ctypes.POINTER(Layer)
    found.ringserve_before_attention.argtypes = [layer, *[pointer] * 7, integer, ctypes.c_int, ctypes.c_int]
    own = ctypes.POINTER(_OwnRows)
    found.ringserve_whole_layer.argtypes = [layer, own, *[pointer] * 10, integer, integer, ctypes.c_int, ctypes.c_int]
    found.ringserve_behind_attention.argtypes = [layer, *[pointer] * 5, integer, integer, ctypes.c_int, ctypes.c_int]
    found.ringserve_choose.argtypes = [pointer, pointer, pointer, *[integer] * 3, ctypes.c_int, ctypes.c_int]
    found.ringserve_paged_floats.argtypes = [integer] * 4
    found.ringserve_paged_floats.restype = integer
    found.ringserve_use_pool.argtypes = [pointer]
    found.ringserve_use_pool(_pool())
    found.ringserve_use_tiles(True)
    found.ringserve_use_pairs(True)
    return found


def _pool() -> int | None:
    """Return the address of `GOMP_parallel` of torch's OpenMP; None leaves the kernels to the calling thread."""
    beside = Path(torch.__file__).parent / "lib"
    names = [str(path) for kind in ("gomp", "omp", "iomp") for path in beside.glob(f"lib{kind}*.so*")]
    for name in (*names, None):
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


class NativeCpu:
    """Attention on CPUs by this package's own kernels. Sizes that these do not support go to torch's kernel.

    A query's result has the same bits in every call of at most MAX_SINGLE_TOKENS queries, and the same bits in every
    larger call; between the two kinds the bits may differ.
    """

    name: ClassVar[str] = "native_cpu"
    is_fast: ClassVar[bool] = True
    page_multiple: ClassVar[int] = 1
    skips_empty: ClassVar[bool] = True
    takes_bounds: ClassVar[bool] = False

    def __init__(self) -> None:
        self._torch = TorchCpuFlash()

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cpu" and dtype in DTYPES and library() is not None

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend."""
        num_tokens, num_stored = q.shape[0], k.shape[0]
        assert not causal or num_tokens == num_stored, f"causal needs T == S, not {num_tokens} and {num_stored}"
        if not num_tokens or not num_stored:
            return empty_partial(q)
        if not _serves(q, k):
            return self._torch.partial_attention(q, k, v, causal=causal, scale=scale)
        if num_tokens <= MAX_SINGLE_TOKENS and k.is_contiguous() and v.is_contiguous():
            return self._attend_singly(q, k, v, 0 if causal else None, scale)
        if causal:
            return _attend(q, [KvRun(k, v)], *_seen(num_tokens, 0), scale)
        return _attend(q, [KvRun(k, v)], *_whole(num_tokens, num_stored), scale)

    def attend_newest(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> Partial:
        """See NewestAttention."""
        num_tokens, earlier = q.shape[0], k.shape[0] - q.shape[0]
        if not _serves(q, k):
            return self._torch.attend_newest(q, k, v, scale=scale)
        if num_tokens <= MAX_SINGLE_TOKENS and k.is_contiguous() and v.is_contiguous():
            return self._attend_singly(q, k, v, earlier, scale)
        return _attend(q, [KvRun(k, v)], *_seen(num_tokens, earlier), scale)

    def attend_between(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: torch.Tensor,
        stop: torch.Tensor,
        *,
        scale: float,
    ) -> Partial:
        """See BandAttention."""
        if _serves(q, k):
            return _attend(q, [KvRun(k, v)], first, stop, scale)
        at = torch.arange(k.shape[0])
        hidden = (at < first[:, None]) | (at >= stop[:, None])
        return self._torch.attend_masked(q, k, v, hidden, scale=scale)

    def serves_whole(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """See WholeAttention."""
        return q.shape[0] > MAX_SINGLE_TOKENS and q.dtype == k.dtype and _serves(q, k)

    def attend_whole(
        self,
        q: torch.Tensor,
        runs: Sequence[KvRun],
        out: torch.Tensor,
        *,
        scale: float,
        bounds: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """See WholeAttention."""
        if bounds is None:
            bounds = _seen(q.shape[0], sum(run.k.shape[0] for run in runs) - q.shape[0])
        _attend_into(q, runs, *bounds, scale, out)

    def attend_rows(self, q: torch.Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        """See RowAttention."""
        parts = [
            self.partial_attention(q[row : row + 1], run.k, run.v, causal=False, scale=scale)
            for row, run in enumerate(runs)
        ]
        if len(parts) == 1:
            return parts[0]
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend."""
        if not _serves(q, shards.k):
            return self._attend_copies(q, shards, scale)
        return _attend_pages(q, shards.k, shards.v, shards.table, shards.lengths, max(shards.stored), scale)

    def _attend_copies(self, q: torch.Tensor, shards: PagedShards, scale: float) -> Partial:
        """Attend by torch's kernel, for cases that ours lacks. It follows no tables: each row's pages are copied."""
        parts = []
        for row, stored in enumerate(shards.stored):
            pages = shards.table[row, : -(-stored // shards.k.shape[1])]
            k, v = (each[pages].flatten(0, 1)[:stored] for each in (shards.k, shards.v))
            parts.append(self._torch.partial_attention(q[row : row + 1], k, v, causal=False, scale=scale))
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))

    def _attend_singly(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, earlier: int | None, scale: float
    ) -> Partial:
        """Attend each query by itself over a run as one page of keys. Query t sees `earlier` + t + 1 keys, or all."""
        lengths = _lengths(q.shape[0], k.shape[0], earlier)
        return _attend_pages(q, k[None], v[None], _one_page(q.shape[0]), lengths, k.shape[0], scale)


def _serves(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[2] in HEAD_DIMS and q.shape[1] <= MAX_GROUP * k.shape[1] and k.dtype in DTYPES


def _attend(q: torch.Tensor, runs: Sequence[KvRun], low: torch.Tensor, high: torch.Tensor, scale: float) -> Partial:
    """Attend q[T, H, D] over k[S, K, D] and v[S, K, D] of runs: query t sees keys [low[t], high[t]) of all of them.

    Both bounds ascend.
    """
    if q.dtype != runs[0].k.dtype:
        q, runs = q.float(), [KvRun(run.k.float(), run.v.float()) for run in runs]
    out = torch.empty(q.shape, dtype=torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    _attend_into(q, runs, low, high, scale, out, lse)
    return Partial(out, lse)


def _attend_into(
    q: torch.Tensor,
    runs: Sequence[KvRun],
    low: torch.Tensor,
    high: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attend queries over runs of their dtype, and write out[T, H, D], contiguous, and lse[T, H]."""
    found = library()
    assert found is not None
    assert scale > 0.0, f"scale is {scale}, but must be above 0: the kernel finds the largest score before it scales"
    num_tokens, num_heads, head_dim = q.shape
    sizes = (ctypes.c_int64 * 6)(num_tokens, num_heads, runs[0].k.shape[1], head_dim, *q.stride()[:2])
    of_runs = [
        number
        for k, v in ((run.k, run.v) for run in runs)
        for number in (k.data_ptr(), v.data_ptr(), k.shape[0], *k.stride()[:2], *v.stride()[:2])
    ]
    found.ringserve_attend(
        q.data_ptr(),
        (ctypes.c_int64 * len(of_runs))(*of_runs),
        low.data_ptr(),
        high.data_ptr(),
        out.data_ptr(),
        None if lse is None else lse.data_ptr(),
        sizes,
        scale,
        q.dtype == torch.float32,
        out.dtype == torch.float32,
        torch.get_num_threads(),
    )


def _attend_pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float,
) -> Partial:
    """Attend q[B, H, D] over the first `lengths` tokens of the pages of k[P, G, K, D] and v[P, G, K, D] in a table."""
    found = library()
    assert found is not None
    q = q.float().contiguous()
    num_rows, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float32)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    parts = torch.empty(found.ringserve_paged_floats(num_rows, longest, num_heads, head_dim))
    sizes = (ctypes.c_int64 * 7)(num_rows, table.shape[1], k.shape[1], num_heads, k.shape[2], head_dim, longest)
    found.ringserve_attend_pages(
        *(each.data_ptr() for each in (q, k, v, table, lengths, out, lse, parts)),
        sizes,
        scale,
        k.dtype == torch.float32,
        torch.get_num_threads(),
    )
    return Partial(out, lse)


MERGES_EARLY = False
"""See `MergeKernels`."""


def merge_parts(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `MergeKernels`."""
    found = library()
    assert found is not None
    if len(outs) > (most := found.ringserve_most_parts()):
        first = merge_parts(outs[:most], lses[:most])
        return merge_parts([first[0], *outs[most:]], [first[1], *lses[most:]], into)
    outs, lses = ([each.float().contiguous() for each in parts] for parts in (outs, lses))
    out = torch.empty(outs[0].shape) if into is None or into.dtype not in DTYPES else into
    assert out.is_contiguous(), "rows of the result lie side by side"
    lse = torch.empty(lses[0].shape)
    pointers = ((ctypes.c_void_p * len(parts))(*(each.data_ptr() for each in parts)) for parts in (outs, lses))
    is_wide = out.dtype == torch.float32
    sizes = (len(outs), lse.numel(), out.shape[-1], is_wide, torch.get_num_threads())
    found.ringserve_merge(*pointers, out.data_ptr(), lse.data_ptr(), *sizes)
    return out if into is None or into is out else into.copy_(out), lse


@lru_cache(maxsize=64)
def _seen(num_tokens: int, earlier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of the keys that each of T newest tokens sees: up to itself."""
    return torch.zeros(num_tokens, dtype=torch.int64), torch.arange(earlier + 1, earlier + num_tokens + 1)


@lru_cache(maxsize=64)
def _whole(num_tokens: int, num_stored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounds of T tokens that see all keys."""
    return torch.zeros(num_tokens, dtype=torch.int64), torch.full((num_tokens,), num_stored)


@lru_cache(maxsize=64)
def _lengths(num_tokens: int, num_stored: int, earlier: int | None) -> torch.Tensor:
    if earlier is None:
        return torch.full((num_tokens,), num_stored, dtype=torch.int32)
    return torch.arange(earlier + 1, earlier + num_tokens + 1, dtype=torch.int32)


@lru_cache(maxsize=64)
def _one_page(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, 1, dtype=torch.int32)


def packed_shape(weight: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the shape of weight[N, C] packed in `dtype`: N is rounded up to vectors, C of bfloat16 is made even."""
    found = library()
    assert found is not None
    lanes = found.ringserve_lanes()
    num_out, num_in = weight.shape
    return -(-num_out // lanes) * lanes, num_in + (num_in % 2 if dtype == torch.bfloat16 else 0)


def pack_weight(weight: torch.Tensor, packed: torch.Tensor | None = None) -> torch.Tensor:
    """Return weight[N, C] in the order in which `multiply` reads it, in `packed` or in new memory."""
    found = library()
    assert found is not None
    num_out, num_in = weight.shape
    if packed is None:
        packed = torch.empty(packed_shape(weight, weight.dtype), dtype=weight.dtype)
    weight = weight.contiguous()
    is_wide = weight.dtype == torch.float32
    found.ringserve_pack(weight.data_ptr(), packed.data_ptr(), num_out, num_in, is_wide, torch.get_num_threads())
    return packed


def multiply(
    rows: torch.Tensor,
    packed: torch.Tensor,
    num_out: int,
    bias: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return rows[..., C] times a packed weight -> [..., N], in the rows' dtype, plus bias[N].

    fp32 rows may have a weight of bfloat16. With `second`, a packed weight of the same shape, it is silu(first product)
    * second product, each product rounded to the rows' dtype. Many rows are multiplied by tiles, if the processor has
    them. Tiles add fp32 products in another order, so a row's bits depend on the number of rows, unless `rows_alone`
    prevents it.
    """
    found = library()
    assert found is not None
    out = torch.empty(*rows.shape[:-1], num_out, dtype=rows.dtype)
    types = types_of(rows.dtype, packed)
    num_rows = rows.numel() // rows.shape[-1]
    rows = rows.contiguous()
    found.ringserve_linear(
        rows.data_ptr(),
        packed.data_ptr(),
        None if second is None else second.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        num_rows,
        rows.shape[-1],
        num_out,
        types,
        _calls.are_alone,
        torch.get_num_threads(),
    )
    return out


def types_of(dtype: torch.dtype, packed: torch.Tensor) -> int:
    """Return the kernels' code for rows of `dtype` times a weight: 0 bfloat16, 1 fp32 by fp32, 2 fp32 by bfloat16."""
    return 0 if dtype == torch.bfloat16 else 1 if packed.dtype == torch.float32 else 2


class _Calls(threading.local):
    are_alone = False


_calls = _Calls()


@contextmanager
def rows_alone() -> Iterator[None]:
    """Give each row of this thread's products the bits that it would have if it were the only row.

    Example: a decode step, in which a draft must not change the token that its sequence has without it.
    """
    before, _calls.are_alone = _calls.are_alone, True
    try:
        yield
    finally:
        _calls.are_alone = before


def normalize(rows: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return rows[..., C] / sqrt(mean(rows^2) + epsilon) * weight[C] in their dtype; the quotient is rounded first."""
    found = library()
    assert found is not None
    assert weight.dtype == rows.dtype, f"a norm of {weight.dtype} for rows of {rows.dtype}"
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    num_features = rows.shape[-1]
    found.ringserve_normalize(
        rows.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows.numel() // num_features,
        num_features,
        epsilon,
        rows.dtype == torch.float32,
        torch.get_num_threads(),
    )
    return out


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return states[T, H, D] turned by the angles of cos[T, D] and sin[T, D], of one dtype: a new tensor.

    Each product below is rounded to the dtype before it is added. Number d of the first half and d + D / 2 are one
    pair: (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    found = library()
    assert found is not None
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(states.shape, dtype=states.dtype)
    sizes = (ctypes.c_int64 * 5)(*states.shape, *states.stride()[:2])
    pointers = (each.data_ptr() for each in (states, cos, sin, out))
    found.ringserve_rotate(*pointers, sizes, states.dtype == torch.float32, torch.get_num_threads())
    return out


def before_attention(
    layer: Layer, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a layer up to its attention: states[T, C] -> q[T, H, D], k and v[T, K, D]. cos and sin are [T, D].

    All are of one dtype and contiguous, except v.
    """
    found = library()
    assert found is not None
    rows, heads, kv_heads, dim = states.shape[0], layer.heads, layer.kv_heads, layer.dim
    joined = states.new_empty(rows, heads + 2 * kv_heads, dim)
    q, k = states.new_empty(rows, heads, dim), states.new_empty(rows, kv_heads, dim)
    normed = torch.empty_like(states)
    found.ringserve_before_attention(
        layer,
        states.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        normed.data_ptr(),
        joined.data_ptr(),
        q.data_ptr(),
        k.data_ptr(),
        rows,
        _calls.are_alone,
        torch.get_num_threads(),
    )
    return q, k, joined[:, heads + kv_heads :]


def after_attention(layer: Layer, states: torch.Tensor, attended: torch.Tensor, most: int) -> torch.Tensor:
    """Run the rest of a layer: its input states[T, C] and attended[T, H, D], both contiguous -> [T, C].

    The MLP computes at most `most` rows at a time, which bounds its memory.
    """
    found = library()
    assert found is not None
    rows, part = states.shape[0], min(states.shape[0], most)
    out, normed = torch.empty_like(states), torch.empty_like(states)
    product = states.new_empty(part, layer.middle)
    found.ringserve_behind_attention(
        layer,
        states.data_ptr(),
        attended.data_ptr(),
        normed.data_ptr(),
        product.data_ptr(),
        out.data_ptr(),
        rows,
        part,
        _calls.are_alone,
        torch.get_num_threads(),
    )
    return out


def whole_layer(
    layer: Layer, own: OwnRows, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float, most: int
) -> torch.Tensor:
    """Run a whole layer on rows whose KV this process alone stores and attends: states[T, C] -> [T, C].

    The result has the bits of `before_attention`, then `NativeCpu.paged_attention` (PagedRows) or `attend_whole`
    (PromptRows), then `after_attention`. The layer must be one that `attends` accepts. All tensors have the layer's
    dtype and are contiguous.
    """
    found = library()
    assert found is not None
    rows, part = states.shape[0], min(states.shape[0], most)
    assert own.k.shape[1:] == (layer.kv_heads, layer.dim) and own.k.dtype == states.dtype, "the cache is the layer's"
    assert own.slots.shape[0] == rows, f"{own.slots.shape[0]} slots for {rows} rows"
    out = torch.empty_like(states)
    *starts, end = _starts(rows, part, layer.features, layer.heads, layer.kv_heads, layer.dim, layer.middle, own.copied)
    memory = own.memory(end, states.dtype)
    *places, copies = (memory.data_ptr() + start * states.itemsize for start in starts)
    found.ringserve_whole_layer(
        layer,
        own._own(scale, copies),
        *(each.data_ptr() for each in (states, cos, sin)),
        *places,
        out.data_ptr(),
        rows,
        part,
        _calls.are_alone,
        torch.get_num_threads(),
    )
    return out


@lru_cache(maxsize=64)  # the same for all layers of a step
def _starts(
    rows: int, part: int, features: int, heads: int, kv_heads: int, dim: int, middle: int, copied: int
) -> tuple[int, ...]:
    """Return the offsets, in numbers, of a layer's tensors in its working memory, in the kernel's order.

    The last two are the offset of the copied KV and the size.
    """
    of_heads = [rows * dim * count for count in (heads + 2 * kv_heads, heads, kv_heads, heads)]
    sizes = [rows * features, *of_heads, part * middle, 2 * copied * kv_heads * dim]
    return (0, *accumulate(-(-size // NUMBERS_PER_LINE) * NUMBERS_PER_LINE for size in sizes))


def chooses(logits: torch.Tensor) -> bool:
    """Return whether `choose_tokens` takes these logits."""
    return logits.device.type == "cpu" and logits.dtype in CHOSEN_DTYPES and library() is not None


def choose_tokens(logits: torch.Tensor, parameters: Sequence[tuple[float, float, float, float, float]]) -> list[int]:
    """Return the token of each row of logits[R, V], -1 if its largest logit is NaN or infinite.

    Each row has (temperature, top_k, top_p, min_p, a random number in [0, 1)). Temperature 0 takes the first of the
    largest logits, any other draws by weights in fp64; a row's token is the same whatever rows are beside it.
    Example: `choose_tokens(torch.tensor([[0.0, 2.0, 2.0]]), [(0.0, 0, 1.0, 0.0, 0.0)])` is [1].
    """
    found = library()
    assert found is not None
    num_rows, size = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    given, tokens = torch.tensor(parameters, dtype=torch.float64), torch.empty(num_rows, dtype=torch.int64)
    found.ringserve_choose(
        logits.data_ptr(),
        given.data_ptr(),
        tokens.data_ptr(),
        num_rows,
        size,
        logits.stride(0),
        CHOSEN_DTYPES.index(logits.dtype),
        torch.get_num_threads(),
    )
    chosen: list[int] = tokens.tolist()
    return chosen


def attends(layer: Layer) -> bool:
    """Return whether `whole_layer` attends heads of the layer's sizes."""
    return layer.dim in HEAD_DIMS and layer.heads <= MAX_GROUP * layer.kv_heads


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether `multiply` takes weights of a dtype: float32, and bfloat16 on AVX512-BF16 or AMX."""
    found = library()
    if found is None or dtype not in DTYPES:
        return False
    return dtype == torch.float32 or bool(found.ringserve_multiplies_bfloat16())

"""GPU backends as far as a CPU can test them: arguments of their kernels, use of the results, and refusals.

The reference replaces the kernels.
"""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from ringserve.cp_core.attention.backends import select_backend
from ringserve.cp_core.attention.flash_attn import FlashAttention
from ringserve.cp_core.attention.flash_attn_3 import FlashAttention3
from ringserve.cp_core.attention.partial import (
    AttentionBackend,
    PagedBackend,
    PagedShards,
    attend_pages,
    empty_partial,
    takes_pages,
)
from ringserve.cp_core.attention.reference import ReferenceAttention
from ringserve.cp_core.attention.torch_cuda import TorchCudaFlash
from ringserve.cp_core.attention.triton_decode import TritonDecode
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.step_plans import RowIndices
from tests.oracles import largest, oracle_partial, random_tokens


def torch_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
) -> tuple[Any, ...]:
    """Return tensors of the operator's shapes and dtypes, as torch derives them, filled by the reference."""
    shaped = torch.ops.aten._scaled_dot_product_flash_attention(
        *(each.to("meta") for each in (q, k, v)), dropout, causal, debug, scale=scale
    )
    assert (dropout, debug) == (0.0, False)
    part = ReferenceAttention().partial_attention(
        *(each[0].transpose(0, 1) for each in (q, k, v)), causal=causal, scale=scale
    )
    out = part.out.transpose(0, 1).unsqueeze(0).to(q.dtype)
    lse = part.lse.transpose(0, 1).unsqueeze(0)
    assert (out.shape, out.dtype) == (shaped[0].shape, shaped[0].dtype)
    assert (lse.shape, lse.dtype) == (shaped[1].shape, shaped[1].dtype)
    return out, lse, *shaped[2:]


def varlen_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Compute by the signature of flash-attn 2.7 and 2.8; lse is [H, T]."""
    assert return_attn_probs
    assert dropout_p == 0.0
    assert softmax_scale is not None
    if block_table is not None:
        assert not causal
        assert max_seqlen_q == 1
        stored = _lengths(cu_seqlens_k)
        assert max(stored) == max_seqlen_k
        return *_paged_answer(q, k, v, cu_seqlens_q, stored, block_table, softmax_scale), None
    for lengths, longest, tensor in ((cu_seqlens_q, max_seqlen_q, q), (cu_seqlens_k, max_seqlen_k, k)):
        assert lengths.dtype == torch.int32
        assert lengths.tolist() == [0, tensor.shape[0]] == [0, longest]
    part = ReferenceAttention().partial_attention(q, k, v, causal=causal, scale=softmax_scale)
    return part.out.to(q.dtype), part.lse.transpose(0, 1).contiguous(), None


class Fa3Kernels:
    """Functions of `fa3_fwd_interface` 0.0.3, as far as they are called; `lengths` are those of their calls."""

    def __init__(self) -> None:
        self.lengths: list[tuple[list[int], list[int]]] = []

    @property
    def fa3_fwd_cuda(self) -> Fa3Kernels:
        return self

    def fwd(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, ...]:
        """Have the arguments of the operator, of which the last eleven are given."""
        *none, softmax_scale, causal = others[:22]
        assert none == [None] * 20
        assert others[22:] == (-1, -1, 0, 0.0, True, None, 1, None, 0)
        self.lengths.append(([q.shape[1]], [k.shape[1]]))
        part = ReferenceAttention().partial_attention(q[0], k[0], v[0], causal=causal, scale=softmax_scale)
        return part.out.to(q.dtype).unsqueeze(0), part.lse.t().contiguous().unsqueeze(0)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        return_attn_probs: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_attn_probs
        queries, keys = _lengths(cu_seqlens_q), _lengths(cu_seqlens_k)
        assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
        self.lengths.append((queries, keys))
        parts = [
            ReferenceAttention().partial_attention(*each, causal=causal, scale=softmax_scale)
            for each in zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
        ]
        out, lse = torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts])
        return out.to(q.dtype), lse.t().contiguous()


def torch_varlen_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Any, ...]:
    """`aten::_flash_attention_forward` as `torch.nn.attention.varlen` calls it without pages."""
    assert (dropout, return_debug_mask, window_size_left, window_size_right) == (0.0, False, -1, -1)
    out, lse = Fa3Kernels().flash_attn_varlen_func(q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, scale, causal, True)
    return out, lse, None, None, None


def torch_paged_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
) -> tuple[Any, ...]:
    """`aten::_flash_attention_forward` as `torch.nn.attention.varlen` calls it for a paged cache."""
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert {"scale", "window_size_left", "window_size_right", "seqused_k", "block_table"} <= set(names)
    assert (dropout, causal, return_debug_mask, window_size_left, window_size_right) == (0.0, False, False, -1, -1)
    assert (max_q, max_k, seqused_k.dtype) == (1, int(seqused_k.max()), torch.int32)
    assert _lengths(cum_seq_k) == seqused_k.tolist()
    out, lse = _paged_answer(q, k, v, cum_seq_q, seqused_k.tolist(), block_table, scale)
    return out, lse, None, None, None


def _lengths(cumulative: torch.Tensor) -> list[int]:
    assert cumulative.dtype == torch.int32
    assert int(cumulative[0]) == 0
    return [int(each) for each in cumulative.diff()]


def _paged_answer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    stored: list[int],
    table: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert _lengths(cu_seqlens_q) == [1] * q.shape[0]
    assert table.dtype == torch.int32
    assert table.stride(-1) == 1
    assert k.shape[1] % 256 == 0
    shards = PagedShards(k, v, table, tuple(stored), torch.tensor(stored, dtype=torch.int32))
    part = ReferenceAttention().paged_attention(q, shards, scale=scale)
    return part.out.to(q.dtype), part.lse.transpose(0, 1).contiguous()


BACKENDS: list[AttentionBackend] = [TorchCudaFlash(torch_kernel), FlashAttention(varlen_kernel)]
PAGED: list[PagedBackend] = [TorchCudaFlash(torch_kernel, torch_paged_kernel), FlashAttention(varlen_kernel)]


def _name(backend: AttentionBackend) -> str:
    return backend.name


@pytest.mark.parametrize("backend", BACKENDS, ids=_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_tokens", "num_stored", "causal"), [(1, 130, False), (33, 65, False), (65, 65, True)])
def test_queries_reach_the_kernel_and_answers_come_back_in_our_layout(
    backend: AttentionBackend, dtype: torch.dtype, head_dim: int, num_tokens: int, num_stored: int, causal: bool
) -> None:
    """Partials within the rounding of the kernel's 16-bit out."""
    tokens = random_tokens(num_stored, num_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=dtype)
    q, scale = tokens.q[:num_tokens], head_dim**-0.5
    part = backend.partial_attention(q, tokens.k, tokens.v, causal=causal, scale=scale)
    right = oracle_partial(q, tokens.k, tokens.v, causal=causal, scale=scale)
    assert part.lse.dtype == torch.float32
    assert (part.out.shape, part.lse.shape) == (q.shape, q.shape[:2])
    assert largest(part.out.double() - right.out) <= 1.05 * largest(right.out.to(dtype).double() - right.out)
    assert largest(part.lse.double() - right.lse) <= 2e-6 * max(1.0, largest(right.lse))


@pytest.mark.parametrize("backend", BACKENDS, ids=_name)
@pytest.mark.parametrize(("num_tokens", "num_stored"), [(0, 5), (3, 0), (0, 0)])
def test_zero_lengths_never_reach_the_kernel(backend: AttentionBackend, num_tokens: int, num_stored: int) -> None:
    tokens = random_tokens(5, dtype=torch.float16)
    part = backend.partial_attention(
        tokens.q[:num_tokens], tokens.k[:num_stored], tokens.v[:num_stored], causal=False, scale=0.125
    )
    assert torch.equal(part.out, torch.zeros(num_tokens, 4, 64))
    assert torch.equal(part.lse, torch.full((num_tokens, 4), -torch.inf))


@pytest.mark.parametrize("backend", BACKENDS, ids=_name)
def test_what_the_kernels_are_not_made_for_is_refused(backend: AttentionBackend) -> None:
    for head_dim in (60, 264):
        tokens = random_tokens(3, head_dim=head_dim, dtype=torch.float16)
        with pytest.raises(AssertionError, match=f"head dimension is {head_dim}; .* multiples of 8 up to 256"):
            backend.partial_attention(tokens.q, tokens.k, tokens.v, causal=False, scale=0.125)
    tokens = random_tokens(5, dtype=torch.float16)
    with pytest.raises(AssertionError, match="causal needs T == S, not 3 and 5"):
        backend.partial_attention(tokens.q[:3], tokens.k, tokens.v, causal=True, scale=0.125)


@pytest.mark.parametrize("backend", PAGED, ids=_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_block_tables_reach_the_kernel(backend: PagedBackend, dtype: torch.dtype) -> None:
    """Three sequences over scattered pages of 256 tokens, one of them not on this rank."""
    assert takes_pages(backend, 256)
    assert takes_pages(backend, 512)
    assert not takes_pages(backend, 16)
    sequences = [random_tokens(length, dtype=dtype, seed=length) for length in (300, 0, 256)]
    k_pages, v_pages = (torch.full((5, 256, 2, 64), torch.nan, dtype=dtype) for _ in range(2))
    for page, (sequence, start) in {4: (0, 0), 1: (0, 256), 2: (2, 0)}.items():
        for pages, stored in ((k_pages, sequences[sequence].k), (v_pages, sequences[sequence].v)):
            piece = stored[start : start + 256]
            pages[page, : piece.shape[0]] = piece
    table, lengths = [[4, 1], [0, 0], [2, 0]], [300, 0, 256]
    shards = PagedShards(
        k_pages,
        v_pages,
        torch.tensor(table, dtype=torch.int32),
        tuple(lengths),
        torch.tensor(lengths, dtype=torch.int32),
    )
    q = random_tokens(3, dtype=dtype, seed=1).q
    part = attend_pages(backend, q, shards, 0.125, RowIndices())
    assert torch.isneginf(part.lse[1]).all()
    for row in (0, 2):
        right = oracle_partial(q[row : row + 1], sequences[row].k, sequences[row].v, causal=False, scale=0.125)
        assert largest(part.out[row] - right.out[0]) <= 1.05 * largest(right.out.to(dtype).double() - right.out)
        assert largest(part.lse[row] - right.lse[0]) <= 2e-6 * max(1.0, largest(right.lse))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_takes_what_torch_brings_on_a_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if flash-attn is installed: it is taken by name alone."""
    installed: Any = ModuleType("flash_attn")
    installed.flash_attn_varlen_func = varlen_kernel
    monkeypatch.setitem(sys.modules, "flash_attn", installed)
    assert select_backend("auto", "cuda:0", dtype).name == "triton_decode"
    assert select_backend("flash_attn", "cuda:0", dtype).name == "flash_attn"
    assert select_backend("reference", "cuda:0", dtype).name == "reference"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_backend("auto", "cuda:0", dtype).name == "torch_cuda_flash"


def test_many_queries_go_to_torchs_kernel_and_decode_over_pages_to_tritons() -> None:
    """Pages of any size, and sequences of which nothing is stored: the kernel reads the lengths on the device."""
    calls = []

    class Kernels:
        def attend_pages(self, q: torch.Tensor, *pages: Any, **bounds: Any) -> tuple[torch.Tensor, torch.Tensor]:
            assert bounds == {"firsts": None, "most_seen": 0, "ends": None}
            calls.append(pages)
            nothing = empty_partial(q)
            return nothing.out, nothing.lse

    backend = TritonDecode(TorchCudaFlash(torch_kernel), Kernels())
    tokens = random_tokens(5, dtype=torch.float16)
    part = backend.partial_attention(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
    right = oracle_partial(tokens.q, tokens.k, tokens.v, causal=True, scale=0.125)
    assert largest(part.out.double() - right.out) <= 1e-3
    assert takes_pages(backend, 16)
    pages, table, lengths = torch.zeros(2, 16, 2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.tensor([3, 0])
    attend_pages(backend, tokens.q[:2], PagedShards(pages, pages, table, (3, 0), lengths), 0.125, RowIndices())
    (given,) = calls
    assert all(left is right for left, right in zip(given, (pages, pages, table, lengths, 0.125), strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_several_sequences_reach_a_kernel_in_one_call(causal: bool) -> None:
    """Uneven lengths side by side; within the rounding of bfloat16."""
    kernels = Fa3Kernels()
    torch_flash = TorchCudaFlash(torch_kernel, torch_varlen_kernel)
    decode = TritonDecode(torch_flash, object())
    queries = [3, 1, 65]
    keys = queries if causal else [7, 130, 1]
    sequences = [
        random_tokens(max(each), dtype=torch.bfloat16, seed=max(each)) for each in zip(queries, keys, strict=True)
    ]
    q = torch.cat([each.q[:count] for each, count in zip(sequences, queries, strict=True)])
    k, v = (
        torch.cat([getattr(each, name)[:count] for each, count in zip(sequences, keys, strict=True)]) for name in "kv"
    )
    for backend in (torch_flash, decode, FlashAttention3(kernels, decode)):
        part = backend.attend_many(q, k, v, queries, keys, causal=causal, scale=0.125)
        at = 0
        for tokens, num_queries, num_keys in zip(sequences, queries, keys, strict=True):
            right = oracle_partial(
                tokens.q[:num_queries], tokens.k[:num_keys], tokens.v[:num_keys], causal=causal, scale=0.125
            )
            stop = at + num_queries
            floor = largest(right.out.bfloat16().double() - right.out)
            assert largest(part.out[at:stop].double() - right.out) <= 1.05 * floor
            assert largest(part.lse[at:stop] - right.lse) <= 2e-6 * max(1.0, largest(right.lse))
            at = stop
    assert kernels.lengths == [(queries, keys)]


def test_few_queries_over_many_keys_stay_with_the_kernel_that_splits_the_keys() -> None:
    kernels = Fa3Kernels()
    backend = FlashAttention3(kernels, TritonDecode(TorchCudaFlash(torch_kernel), object()))
    tokens = random_tokens(600, num_heads=64, num_kv_heads=2, dtype=torch.bfloat16)
    for num_queries, causal in ((1, False), (128, False), (600, False), (600, True)):
        q = tokens.q[:num_queries]
        part = backend.partial_attention(q, tokens.k, tokens.v, causal=causal, scale=0.125)
        right = oracle_partial(q, tokens.k, tokens.v, causal=causal, scale=0.125)
        assert largest(part.out.double() - right.out) <= 1.05 * largest(right.out.bfloat16().double() - right.out)
    assert kernels.lengths == [([600], [600]), ([600], [600])]


def test_auto_takes_flash_attention_3_on_hopper_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 alone, which is what its build has; other GPUs keep torch's kernel."""
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", ModuleType("fa3_fwd_interface"))
    sys.modules["fa3_fwd_interface"].__spec__ = importlib.machinery.ModuleSpec("fa3_fwd_interface", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype, name in (
        ((9, 0), torch.bfloat16, "flash_attn_3"),
        ((9, 0), torch.float16, "triton_decode"),
        ((8, 0), torch.bfloat16, "triton_decode"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert select_backend("auto", "cuda:0", dtype).name == name
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    with pytest.raises(ConfigError, match=r"fa3-fwd cannot be imported .*; install another version of it, or name"):
        FlashAttention3()


@pytest.mark.parametrize("name", ["triton_decode", "torch_cuda_flash", "flash_attn"])
def test_gpu_kernels_refuse_cpus_and_fp32(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' does not support torch\.float16 on cpu"):
        select_backend(name, "cpu", torch.float16)
    with pytest.raises(ConfigError, match=rf"'{name}' does not support torch\.float32 on cuda"):
        select_backend(name, "cuda", torch.float32)


def test_a_missing_package_is_said_and_nothing_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(
        ConfigError, match=r"cannot be imported .*; install ringserve\[flash-attn\], or use 'torch_cuda_flash'"
    ):
        select_backend("flash_attn", "cuda:0", torch.bfloat16)

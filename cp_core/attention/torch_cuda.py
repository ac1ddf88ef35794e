"""Torch's flash attention kernel for NVIDIA GPUs. Written against torch 2.13; run on an H100 with 2.11.

The other GPU backends build on it.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial, cumulative, empty_partial

# The kernel is compiled for head dimensions up to this one, in steps of 8.
MAX_HEAD_DIM = 256
# Page size, in tokens, for flash kernels that follow a block table.
PAGE_MULTIPLE = 256
# Query tokens per kernel tile, and processors of an H100 or H200, which stand for those of any GPU. With fewer tiles
# some processors idle, and a kernel that splits the keys is faster: on an H100, 128 queries over 128K keys run at 282
# TFLOP/s with torch's kernel, and at 200 with FlashAttention 3, which does not split.
TILE_TOKENS = 128
PROCESSORS = 132


def fills_gpu(queries: Sequence[int], num_heads: int) -> bool:
    """Return whether these numbers of queries, one per sequence, make at least one tile per processor of a GPU."""
    return sum(-(-tokens // TILE_TOKENS) for tokens in queries) * num_heads >= PROCESSORS


class TorchCudaFlash:
    """`aten::_scaled_dot_product_flash_attention`: 16-bit inputs, grouped K/V heads, fp32 natural-log LSE.

    Its out stays in 16 bits, which rounds each partial once more than on a CPU. Zero lengths never reach the kernel.
    """

    name: ClassVar[str] = "torch_cuda_flash"
    is_fast: ClassVar[bool] = True
    page_multiple: ClassVar[int] = PAGE_MULTIPLE
    skips_empty: ClassVar[bool] = False
    takes_bounds: ClassVar[bool] = False
    fills = staticmethod(fills_gpu)

    def __init__(
        self, kernel: Callable[..., Any] | None = None, varlen_kernel: Callable[..., Any] | None = None
    ) -> None:
        """`kernel` and `varlen_kernel` replace the operators in tests."""
        self._kernel = kernel or torch.ops.aten._scaled_dot_product_flash_attention
        self._varlen_kernel = varlen_kernel or torch.ops.aten._flash_attention_forward

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend."""
        num_tokens, num_stored = q.shape[0], k.shape[0]
        check_head_dim(q.shape[-1])
        assert not causal or num_tokens == num_stored, f"causal needs T == S, not {num_tokens} and {num_stored}"
        if not num_tokens or not num_stored:
            return empty_partial(q)
        # [T, H, D] -> [1, H, T, D]. No dropout, no debug mask.
        out_bhtd, lse_bht, *_ = self._kernel(
            *(each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)), 0.0, causal, False, scale=scale
        )
        return Partial(out_bhtd[0].transpose(0, 1), lse_bht[0].transpose(0, 1))

    def attend_many(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        causal: bool,
        scale: float,
    ) -> Partial:
        """See VarlenAttention: one call of the operator behind `torch.nn.attention.varlen`."""
        check_head_dim(q.shape[-1])
        out_thd, lse_ht, *_ = self._varlen_kernel(
            q,
            k,
            v,
            cumulative(tuple(queries), q.device),
            cumulative(tuple(keys), q.device),
            max(queries),
            max(keys),
            0.0,
            causal,
            return_debug_mask=False,
            scale=scale,
            window_size_left=-1,
            window_size_right=-1,
        )
        return Partial(out_thd, lse_ht.transpose(0, 1))

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend: one call of the operator behind `torch.nn.attention.varlen`, which follows the table."""
        check_head_dim(q.shape[-1])
        out_bhd, lse_hb, *_ = self._varlen_kernel(
            q,
            shards.k,
            shards.v,
            cumulative((1,) * len(shards), q.device),
            cumulative(shards.stored, q.device),
            1,
            max(shards.stored),
            0.0,
            False,
            return_debug_mask=False,
            scale=scale,
            window_size_left=-1,
            window_size_right=-1,
            seqused_k=shards.lengths,
            block_table=shards.table,
        )
        return Partial(out_bhd.float(), lse_hb.transpose(0, 1))


def check_head_dim(head_dim: int) -> None:
    """Assert that the flash kernels support this head dimension. Other models need the reference backend."""
    assert head_dim <= MAX_HEAD_DIM and head_dim % 8 == 0, (
        f"head dimension is {head_dim}; flash attention supports multiples of 8 up to {MAX_HEAD_DIM}"
    )

"""Kernel of the flash-attn package (optional extra `flash-attn`), for sequences of any length.

Written against versions 2.7 and 2.8. 2.8.3 was built on an H100 and compared with another kernel (which one is not
recorded): its outs differed by 2e-3, its LSEs by 1e-7. `backends` chooses it if the configuration names it. It changes
no tensor that it is given.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial, cumulative, empty_partial
from ringserve.cp_core.attention.torch_cuda import PAGE_MULTIPLE, check_head_dim
from ringserve.cp_core.errors import ConfigError


class FlashAttention:
    """`flash_attn_varlen_func`: 16-bit inputs, fp32 natural-log LSE, 16-bit out, widened to fp32.

    "auto" never chooses it: it serves only if the configuration names "flash_attn".
    """

    name: ClassVar[str] = "flash_attn"
    is_fast: ClassVar[bool] = False
    page_multiple: ClassVar[int] = PAGE_MULTIPLE
    skips_empty: ClassVar[bool] = False
    takes_bounds: ClassVar[bool] = False

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        """`kernel` replaces the package's function in tests. Raises ConfigError if the package is missing."""
        self._kernel = kernel or _load_kernel()

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
        # The function returns the LSE only if attention probabilities are requested too. It returns those empty.
        out_thd, lse_ht, _ = self._kernel(
            q,
            k,
            v,
            cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=q.device),
            cu_seqlens_k=torch.tensor([0, num_stored], dtype=torch.int32, device=q.device),
            max_seqlen_q=num_tokens,
            max_seqlen_k=num_stored,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            return_attn_probs=True,
        )
        return Partial(out_thd.float(), lse_ht.transpose(0, 1))

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend: one call for the whole batch; the kernel follows the block table."""
        check_head_dim(q.shape[-1])
        out_bhd, lse_hb, _ = self._kernel(
            q,
            shards.k,
            shards.v,
            cu_seqlens_q=cumulative((1,) * len(shards), q.device),
            cu_seqlens_k=cumulative(shards.stored, q.device),
            max_seqlen_q=1,
            max_seqlen_k=max(shards.stored),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=False,
            return_attn_probs=True,
            block_table=shards.table,
        )
        return Partial(out_bhd.float(), lse_hb.transpose(0, 1))


def _load_kernel() -> Callable[..., Any]:
    try:
        kernel: Callable[..., Any] = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError as error:
        raise ConfigError(
            f"attention_backend is 'flash_attn', but that package cannot be imported ({error}); "
            "install ringserve[flash-attn], or use 'torch_cuda_flash'"
        ) from error
    return kernel

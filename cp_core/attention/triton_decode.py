"""Backend for NVIDIA GPUs: torch's flash kernel for runs of keys, Triton kernels for windows and block tables.

"auto" chooses it on GPUs that FlashAttention 3 does not serve.

Shapes: B sequences with one query each, H query heads, D head dimension.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial
from ringserve.cp_core.attention.torch_cuda import TorchCudaFlash, check_head_dim, fills_gpu


class TritonDecode:
    """Backend for prefill and decode, despite its name.

    Calls without a window or a block table go to `prefill`, torch's flash backend. Only the device reads tables and
    lengths, so a CUDA graph can capture a decode step.
    """

    name: ClassVar[str] = "triton_decode"
    is_fast: ClassVar[bool] = True
    page_multiple: ClassVar[int] = 1
    skips_empty: ClassVar[bool] = True
    takes_bounds: ClassVar[bool] = True
    fills = staticmethod(fills_gpu)

    def __init__(self, prefill: TorchCudaFlash | None = None, kernels: Any = None) -> None:
        """`prefill` attends runs of keys (default: torch's flash kernel). Tests replace `kernels`."""
        self._prefill = prefill or TorchCudaFlash()
        # Triton is imported only when a backend is made: CPU builds of torch come without it.
        self._kernels = kernels or importlib.import_module("ringserve.cp_core.attention.triton_kernels")

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return TorchCudaFlash.supports(device, dtype) and importlib.util.find_spec("triton") is not None

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend."""
        return self._prefill.partial_attention(q, k, v, causal=causal, scale=scale)

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
        """See VarlenAttention."""
        return self._prefill.attend_many(q, k, v, queries, keys, causal=causal, scale=scale)

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
        check_head_dim(q.shape[-1])
        return Partial(*self._kernels.attend_between(q, k, v, first, stop, scale))

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend: two kernel launches for the batch, for any lengths."""
        check_head_dim(q.shape[-1])
        pages = (shards.k, shards.v, shards.table, shards.lengths)
        bounds = {"firsts": shards.firsts, "most_seen": shards.most_seen, "ends": shards.ends}
        return Partial(*self._kernels.attend_pages(q, *pages, scale, **bounds))

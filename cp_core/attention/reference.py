"""Attention in plain tensor operations: slow, available on every device, and the tests' oracle in fp64.

It serves only if the configuration names "reference".
Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ringserve.cp_core.attention.partial import PagedShards, Partial, attend_in_tensors, empty_partial


class ReferenceAttention:
    """softmax(q k^T * scale) v with its log-sum-exp, computed in `dtype` (fp32, or fp64 as an oracle)."""

    name: ClassVar[str] = "reference"
    is_fast: ClassVar[bool] = False
    page_multiple: ClassVar[int] = 1
    skips_empty: ClassVar[bool] = False
    takes_bounds: ClassVar[bool] = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    @staticmethod
    def supports(device: torch.device, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """See AttentionBackend. The whole [H, T, S] score matrix is in memory; out and lse have `dtype`."""
        num_tokens, num_stored = q.shape[0], k.shape[0]
        assert not causal or num_tokens == num_stored, f"causal needs T == S, not {num_tokens} and {num_stored}"
        if not num_tokens or not num_stored:
            return empty_partial(q, self.dtype)
        hidden_ts = torch.ones(num_tokens, num_stored, dtype=torch.bool, device=q.device).triu(1) if causal else None
        return attend_in_tensors(q, k, v, hidden_ts, scale, self.dtype)

    def attend_masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, *, scale: float
    ) -> Partial:
        """See MaskedAttention; out and lse have `dtype`."""
        return attend_in_tensors(q, k, v, hidden, scale, self.dtype)

    def paged_attention(self, q: torch.Tensor, shards: PagedShards, *, scale: float) -> Partial:
        """See PagedBackend. Sequences are attended one by one."""
        parts = []
        for row, stored in enumerate(shards.stored):
            pages = shards.table[row, : -(-stored // shards.k.shape[1])].long()
            k, v = (each[pages].flatten(0, 1)[:stored] for each in (shards.k, shards.v))
            parts.append(self.partial_attention(q[row : row + 1], k, v, causal=False, scale=scale))
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))

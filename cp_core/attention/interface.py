"""Contract of attention kernels: partial attention of queries over a part of the keys.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads (H is a multiple of K), D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch

from cp_core.attention.partial import Partial
from cp_core.layout.step_plans import KvRun


class AttentionBackend(Protocol):
    """One attention kernel."""

    name: ClassVar[str]

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        """Attend q[T, H, D] over k[S, K, D], v[S, K, D]; query head h reads KV head h // (H // K).

        Inputs may be strided views (the last dimension contiguous); none is copied when it is fp32. T or S may be 0.
        `causal` needs T == S: query t sees keys 0..t.
        """
        ...


@runtime_checkable
class RowAttention(Protocol):
    """Backend that attends many single queries, each over keys of its own, cheaper than by one call each."""

    def attend_rows(self, q: torch.Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        """Attend query b of q[B, H, D] over k[S, K, D] and v[S, K, D] of runs[b], S >= 1 and of any size.

        The result has the bits of B calls of `partial_attention`.
        """
        ...

"""Backend for tests that takes several sequences in a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.attention.torch_cpu import TorchCpuFlash


class Together(TorchCpuFlash):
    """Backend that takes several sequences in a call, and counts its calls; up to `few` queries are too few for one."""

    def __init__(self, few: int = 0) -> None:
        self.few = few
        self.num_together = self.num_alone = 0

    def partial_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Partial:
        self.num_alone += 1
        return super().partial_attention(q, k, v, causal=causal, scale=scale)

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
        self.num_together += 1
        assert min(*queries, *keys) > 0
        assert (sum(queries), sum(keys), sum(keys)) == (q.shape[0], k.shape[0], v.shape[0])
        parts = [
            TorchCpuFlash().partial_attention(q_thd, k_skd, v_skd, causal=causal, scale=scale)
            for q_thd, k_skd, v_skd in zip(
                q.split(list(queries)), k.split(list(keys)), v.split(list(keys)), strict=True
            )
        ]
        return Partial(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))

    def fills(self, queries: Sequence[int], num_heads: int) -> bool:
        return sum(queries) > self.few

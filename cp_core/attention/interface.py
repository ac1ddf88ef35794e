"""Partial attention: what every ring algorithm asks of a kernel, and the choice of the kernel.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads (H is a multiple of K), D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

from cp_core.errors import ConfigError
from cp_core.layout.prefill_plan import KvRun


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over a part of the keys, ready to be merged with the other parts.

    out[T, H, D] and lse[T, H] are fp32 whatever the inputs' dtype (fp64 from the oracle); lse is the natural log of the
    softmax denominator. Where lse is -inf nothing was attended and out is undefined, possibly NaN.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, start: int, stop: int) -> Partial:
        """Query rows [start, stop) as views."""
        return Partial(self.out[start:stop], self.lse[start:stop])


def empty_partial(q_thd: torch.Tensor, dtype: torch.dtype = torch.float32) -> Partial:
    """The part that attended nothing: (0, -inf)."""
    return Partial(
        torch.zeros(q_thd.shape, dtype=dtype, device=q_thd.device),
        torch.full(q_thd.shape[:2], -torch.inf, dtype=dtype, device=q_thd.device),
    )


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
    """A backend that attends many single queries, each over keys of its own, with less ado than one call each."""

    def attend_rows(self, q: torch.Tensor, runs: Sequence[KvRun], *, scale: float) -> Partial:
        """Query b of q[B, H, D] over k[S, K, D] and v[S, K, D] of runs[b], S >= 1 and of any size; the bits of B
        calls of `partial_attention`.
        """
        ...


def select_backend(name: str, device: torch.device | str, dtype: torch.dtype) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest one that serves `device` and `dtype`.

    Raises ConfigError for an unknown name, for one that does not serve this device and dtype or is not installed, and
    for "auto" where only the reference would serve: nobody should get the slow kernel without having asked for it.
    """
    from cp_core.attention.backends import BACKENDS

    device = torch.device(device)
    if name == "auto":
        fast = [kind for kind in BACKENDS if kind.is_fast and kind.supports(device, dtype)]
        if not fast:
            raise ConfigError(
                f"attention_backend is 'auto', but no fast one serves {dtype} on {device}; name 'reference' to use it"
            )
        return fast[0]()
    for kind in BACKENDS:
        if kind.name == name:
            if not kind.supports(device, dtype):
                raise ConfigError(f"attention_backend {name!r} does not serve {dtype} on {device}")
            return kind()
    allowed = ", ".join(["auto", *(kind.name for kind in BACKENDS)])
    raise ConfigError(f"attention_backend is {name!r}; allowed are {allowed}")

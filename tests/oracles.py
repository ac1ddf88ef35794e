"""Reference results in plain fp64 on one device, for all tests.

Shapes: T query tokens, S stored tokens, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringserve.cp_core.attention.partial import Partial
from ringserve.cp_core.attention.reference import ReferenceAttention


@dataclass(frozen=True, slots=True)
class Tokens:
    """q[S, H, D], k[S, K, D], v[S, K, D] of all tokens of one sequence, in order of position."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def random_tokens(
    num_tokens: int,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Tokens:
    """Draw normal q, k and v that depend only on the arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, head_dim, generator=generator).to(dtype)

    return Tokens(draw(num_heads), draw(num_kv_heads), draw(num_kv_heads))


def oracle_partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Partial:
    """Compute fp64 out[T, H, D] and lse[T, H] of the given, already rounded, inputs."""
    return ReferenceAttention(torch.float64).partial_attention(q, k, v, causal=causal, scale=scale)


def causal(tokens: Tokens, scale: float, dtype: torch.dtype, window: int, sink: torch.Tensor | None) -> torch.Tensor:
    """Compute out[S, H, D] of every token over itself and the tokens before it, at once, in `dtype`.

    With a `window` a token sees only the last `window` ones up to itself; a `sink`[H] is one more key without a value.
    """
    places = torch.arange(tokens.q.shape[0])
    behind = places[:, None] - places
    hidden = (behind < 0) | (behind >= (window or len(places) + 1))
    part = ReferenceAttention(dtype).attend_masked(tokens.q, tokens.k, tokens.v, hidden, scale=scale)
    if sink is None:
        return part.out
    return part.out * torch.sigmoid(part.lse - sink.to(dtype))[..., None]


def oracle_causal(tokens: Tokens, scale: float, *, window: int = 0, sink: torch.Tensor | None = None) -> torch.Tensor:
    """Compute fp64 out[S, H, D] of every token over itself and all before it, or as `causal` says."""
    return causal(tokens, scale, torch.float64, window, sink)


def single_rank_error(tokens: Tokens, scale: float, *, window: int = 0, sink: torch.Tensor | None = None) -> float:
    """Return err1 of the tolerance table: the largest error of fp32 attention computed at once on one rank."""
    plain = causal(tokens, scale, torch.float32, window, sink)
    return largest(plain.double() - oracle_causal(tokens, scale, window=window, sink=sink))


def fp32_bound(tokens: Tokens, scale: float, *, window: int = 0, sink: torch.Tensor | None = None) -> float:
    """Return the tolerance of an fp32 output: 2 * err1 + 2e-7 * max |v|."""
    return 2 * single_rank_error(tokens, scale, window=window, sink=sink) + 2e-7 * largest(tokens.v)


def largest(values: torch.Tensor) -> float:
    """Return max |x|, or 0 of an empty tensor."""
    return float(values.abs().max()) if values.numel() else 0.0


def relative_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return max |left - right| / max |right|."""
    return largest(left.double() - right.double()) / max(largest(right), 1e-30)

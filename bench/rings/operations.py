"""Floating-point operations of the work that the benches of rings measure. Pure functions."""

from __future__ import annotations

from ringserve.workers.protocol.ranks import ModelInfo

GEMM_SIZE = 2048
"""Rows of the square matrices of the reference product, which takes one core a fifth of a second."""


def gemm_flops() -> float:
    """Return the operations of one product of two square matrices of GEMM_SIZE; a multiply-add counts two."""
    return 2.0 * GEMM_SIZE**3


def attention_flops(num_tokens: int, num_heads: int, head_dim: int, cached_tokens: int = 0) -> float:
    """Return the operations of causal attention of one layer; only visible pairs count, softmax does not."""
    pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
    return 4.0 * num_heads * head_dim * pairs


def prefill_flops(info: ModelInfo, num_tokens: int) -> float:
    """Return the operations of a model over `num_tokens` new tokens, with logits of the last; norms do not count."""
    projections = info.hidden_size * info.head_dim * (2 * info.num_heads + 2 * info.num_kv_heads)
    layer = 2.0 * num_tokens * (projections + 3 * info.hidden_size * info.intermediate_size)
    attention = attention_flops(num_tokens, info.num_heads, info.head_dim)
    return info.num_layers * (layer + attention) + 2.0 * info.hidden_size * info.vocab_size

"""Floating-point operations of what is measured: two for each multiply-add, softmax and norms left out."""

from __future__ import annotations

from workers.protocol.steps import ModelInfo

# A square product of this size keeps one core at its full rate, and takes it a fifth of a second.
GEMM_SIZE = 2048


def gemm_flops() -> float:
    """One product of two square matrices of GEMM_SIZE."""
    return 2.0 * GEMM_SIZE**3


def attention_flops(num_tokens: int, num_heads: int, head_dim: int, cached_tokens: int = 0) -> float:
    """Causal attention of one layer: only the pairs that are seen count."""
    pairs = num_tokens * cached_tokens + num_tokens * (num_tokens + 1) / 2
    return 4.0 * num_heads * head_dim * pairs


def prefill_flops(info: ModelInfo, num_tokens: int) -> float:
    """A whole model over `num_tokens` new tokens, logits of the last one only."""
    projections = info.hidden_size * info.head_dim * (2 * info.num_heads + 2 * info.num_kv_heads)
    layer = 2.0 * num_tokens * (projections + 3 * info.hidden_size * info.intermediate_size)
    attention = attention_flops(num_tokens, info.num_heads, info.head_dim)
    return info.num_layers * (layer + attention) + 2.0 * info.hidden_size * info.vocab_size

"""Sizes of a model and measured rates of a ring, from which times are predicted. Pure Python.

All cost models, the router and leaders share these dataclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates

PASS_KV = "pass_kv"
PASS_Q = "pass_q"
GATHER_KV = "gather_kv"
CHAIN = "chain"
SP_NTP = "sp_ntp"
PREFILL_ALGORITHMS = (PASS_KV, PASS_Q, GATHER_KV, CHAIN, SP_NTP)
"""Algorithms of a ring's prefill step; of two that take equally long the first is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model, or of one tensor parallel share.

    `element_bytes` are for weights and activations. Queries, keys and values of attention have them too unless
    `kv_element_bytes` says otherwise.
    Partials return in fp32 whatever the model's dtype is. Only a comparison with published times of another system sets
    `partial_bytes`.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    element_bytes: int
    kv_element_bytes: int | None = None
    partial_bytes: int = 4

    @property
    def attention_bytes(self) -> int:
        """Bytes of one number of a query, key or value, in memory and in messages."""
        return self.element_bytes if self.kv_element_bytes is None else self.kv_element_bytes

    @property
    def linear_flops_per_token(self) -> int:
        """FLOP of all layers: the projections of q, k, v and the output, and the three matrices of a gated MLP."""
        q_and_out = 2 * self.hidden_size * self.num_heads * self.head_dim
        k_and_v = 2 * self.hidden_size * self.num_kv_heads * self.head_dim
        mlp = 3 * self.hidden_size * self.intermediate_size
        return 2 * self.num_layers * (q_and_out + k_and_v + mlp)

    @property
    def head_flops(self) -> int:
        """FLOP of one token's logits: prefill needs only the last token's."""
        return 2 * self.hidden_size * self.vocab_size

    def attention_flops(self, new_tokens: int, cached_tokens: int) -> int:
        """Return the FLOP of one layer: each new token over all cached ones, itself and the new ones before it."""
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2
        return 4 * self.num_heads * self.head_dim * pairs

    def share(self, tp: int) -> ModelShape:
        """Return the sizes of one of `tp` tensor parallel processes.

        KV heads are at least one: with more processes than KV heads each is held by several, as arXiv 2411.01783,
        4.2.2 does for its comparison.
        """
        if tp == 1:
            return self
        return replace(
            self,
            intermediate_size=-(-self.intermediate_size // tp),
            num_heads=-(-self.num_heads // tp),
            num_kv_heads=max(1, self.num_kv_heads // tp),
            vocab_size=-(-self.vocab_size // tp),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRates:
    """Rates of one rank in prefill steps: its ring's, and the seconds of a layer that no other term explains.

    If an all-to-all's rate or latency is not given, the link's is used; if `chain_overlap` is not, the ring's overlap.
    A chain's layer has `chain_overhead` times a ring's layer overhead and message latencies.
    """

    ring: RingRates
    layer_overhead_seconds: float = 0.0
    all_to_all_bytes_per_second: float | None = None
    all_to_all_latency_seconds: float | None = None
    chain_overhead: float = 1.0
    chain_overlap: float | None = None

    def __post_init__(self) -> None:
        for name in ("gemm_flops", "attention_flops", "link_bytes_per_second"):
            if not getattr(self.ring, name) > 0.0:
                raise ConfigError(f"{name} is {getattr(self.ring, name)}; allowed is any rate above 0")
        if not self.ring.link_latency_seconds >= 0.0:
            raise ConfigError(f"link_latency_seconds is {self.ring.link_latency_seconds}; allowed is 0 or more")
        if not self.layer_overhead_seconds >= 0.0:
            raise ConfigError(f"layer_overhead_seconds is {self.layer_overhead_seconds}; allowed is 0 or more")
        if not 0.0 <= self.ring.overlap <= 1.0:
            raise ConfigError(f"overlap is {self.ring.overlap}; allowed are 0 to 1")

    def message_seconds(self, num_bytes: float) -> float:
        """Return the time of one ring hop, or of the messages of a collective that share a rank's link."""
        return self.ring.link_latency_seconds + num_bytes / self.ring.link_bytes_per_second if num_bytes else 0.0

    def all_to_all_seconds(self, num_bytes: float) -> float:
        """Return the time of an all-to-all in which one rank sends `num_bytes`."""
        rate, latency = self.all_to_all_bytes_per_second, self.all_to_all_latency_seconds
        rate = self.ring.link_bytes_per_second if rate is None else rate
        latency = self.ring.link_latency_seconds if latency is None else latency
        return latency + num_bytes / rate if num_bytes else 0.0

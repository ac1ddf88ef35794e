"""Seconds of one decode step on a ring of cp x tp processes, by ring pass-Q or by gathered parts.

B rows, N = cp ranks, L layers, c context tokens a row:

    step = weights + L * (2 sums + attention + messages + ring), where
    pass-Q:   attention = N * call(ceil(B / N) rows over c / N tokens), messages = (N - 1) hops + one all-to-all
    gathered: attention = call(B rows over c / N tokens),               messages = one collective

Rows are padded to whole ones on every rank, as arXiv 2411.01783, 4.3 does; gathered parts are vLLM's RFC 26133.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.cost.decode_variant import GATHER, VARIANTS
from cp_core.cost.memory import WeightBytes
from cp_core.cost.model import PASS_Q, ModelShape
from cp_core.cost.profile import HardwareProfile
from cp_core.cost.share import num_hosts, process_share
from cp_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Predicted seconds. Those named `layer_` are one layer's, the columns of arXiv 2411.01783, table 8."""

    variant: str
    num_layers: int
    linear_seconds: float
    sum_seconds: float
    call_seconds: float
    layer_attention_seconds: float
    layer_hops_seconds: float
    layer_collective_seconds: float
    layer_ring_seconds: float

    @property
    def layer_whole_seconds(self) -> float:
        """Attention and messages of one layer."""
        return self.layer_attention_seconds + self.layer_hops_seconds + self.layer_collective_seconds

    @property
    def total_seconds(self) -> float:
        """Time to the next token (TTIT)."""
        layer = self.layer_whole_seconds + self.layer_ring_seconds
        return self.linear_seconds + self.sum_seconds + self.num_layers * layer


def predict_step(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    batch: int,
    context_tokens: float,
    variant: str = PASS_Q,
) -> StepCost:
    """One token of each of `batch` sequences of `context_tokens` each. Raises ConfigError for an unknown variant."""
    if variant not in VARIANTS:
        raise ConfigError(f"decode variant is {variant!r}; allowed are {', '.join(VARIANTS)}")
    share, constants, links = process_share(model, tp), profile.decode, profile.prefill
    rows = batch if variant == GATHER else -(-batch // cp)
    peers = cp - 1
    call = _call_seconds(share, profile, rows, rows * context_tokens / cp)
    query_bytes = rows * share.num_heads * share.head_dim * share.element_bytes
    part_bytes = rows * share.num_heads * (share.head_dim + 1) * share.partial_bytes
    hop = constants.hop_seconds + query_bytes / links.link_bytes_per_second
    collective = constants.all_to_all_seconds + peers * part_bytes / links.all_to_all_bytes_per_second
    # Every process reads its weights once; many rows make the products what takes longer.
    read = (weights.layers + weights.head) / tp / constants.weight_bytes_per_second
    products = rows * (share.linear_flops_per_token + share.head_flops) / links.gemm_flops
    return StepCost(
        variant=variant,
        num_layers=model.num_layers,
        linear_seconds=max(read, products),
        sum_seconds=_sum_seconds(model, profile, tp),
        call_seconds=call,
        layer_attention_seconds=call if variant == GATHER else cp * call,
        layer_hops_seconds=0.0 if variant == GATHER else peers * hop,
        layer_collective_seconds=collective if peers else 0.0,
        layer_ring_seconds=constants.ring_seconds if peers else 0.0,
    )


def fastest_step(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    batch: int,
    context_tokens: float,
) -> StepCost:
    """By the variant that is predicted to take less."""
    steps = (
        predict_step(model, weights, profile, cp=cp, tp=tp, batch=batch, context_tokens=context_tokens, variant=variant)
        for variant in VARIANTS
    )
    return min(steps, key=lambda step: step.total_seconds)


def _call_seconds(share: ModelShape, profile: HardwareProfile, rows: int, tokens: float) -> float:
    """One attention call of `rows` queries over `tokens` stored tokens in all."""
    constants = profile.decode
    kv_bytes = 2 * share.num_kv_heads * share.head_dim * share.element_bytes * tokens
    further = max(0, rows - constants.free_rows)
    return constants.attention_seconds + kv_bytes / constants.kv_bytes_per_second + further * constants.row_seconds


def _sum_seconds(model: ModelShape, profile: HardwareProfile, tp: int) -> float:
    """Two small sums a layer: what they carry is nothing beside what they take to start."""
    if tp == 1:
        return 0.0
    further = num_hosts(profile, tp) - 1
    return 2 * model.num_layers * (profile.decode.sum_seconds + further * profile.decode.host_seconds)

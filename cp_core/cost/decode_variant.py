"""Which variant serves a decode batch, and why. Pure Python, no torch.

B sequences (rows), N ranks, L layers.

Gathered parts (`gather`): every rank computes all B rows, then one gather a layer. Pass-Q (`pass_q`): every rank
computes its ceil(B / N) rows, then N-1 exchanges and one all-to-all a layer: more messages, N times fewer rows.
Attention is the same work in both; in pass-Q it hides part of the exchanges. Predicted seconds of a step:

    gather = linear(B)             + head(B)             + L * (a + gather of parts)
    pass_q = linear(ceil(B / N))   + head(ceil(B / N))   + L * (a + (N-1) * exposed query + parts returned) + tokens

linear(b) and head(b) are the slower of b rows of arithmetic and one reading of the weights; a is one reading of
the KV. So while reading the weights rules, splitting the rows gains nothing and `gather` wins, unless ranks share a
memory: of fewer rows than ranks, pass-Q leaves some ranks without any, and the others read their weights faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.cost.model import PASS_Q, ModelShape, Rates
from cp_core.errors import ConfigError

GATHER = "gather"
VARIANTS = (GATHER, PASS_Q)
VARIANT_POLICIES = ("auto", *VARIANTS)

# Pass-Q must be predicted to be better by this: it sends N times the messages, and every one may be late.
MARGIN = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """What a rank measured of itself: `ring` as for prefill; the bytes of a weight that it reads in a second when it
    multiplies one row by it, while all ranks do so and while it does so alone; the bytes of KV that it attends in a
    second with one query; and the seconds that a small message takes between ranks that were computing just before,
    which is more than between ranks that wait for it.
    """

    ring: Rates
    weight_bytes_per_second: float
    lone_weight_bytes_per_second: float
    kv_bytes_per_second: float
    busy_message_seconds: float

    def __post_init__(self) -> None:
        for name in ("weight_bytes_per_second", "lone_weight_bytes_per_second", "kv_bytes_per_second"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed is any rate above 0")
        if not self.busy_message_seconds >= 0.0:
            raise ConfigError(f"busy_message_seconds is {self.busy_message_seconds}; allowed is 0 or more")

    def weight_rate(self, num_reading: int, num_ranks: int) -> float:
        """Bytes a second of each rank while so many of the ring read weights; linear between one and all."""
        idle = (num_ranks - num_reading) / (num_ranks - 1) if num_ranks > 1 else 0.0
        return self.weight_bytes_per_second + idle * (self.lone_weight_bytes_per_second - self.weight_bytes_per_second)

    def message_seconds(self, num_bytes: float) -> float:
        """One message, or the messages of a collective that share a rank's link."""
        latency = max(self.busy_message_seconds, self.ring.link_latency_seconds)
        return latency + num_bytes / self.ring.link_bytes_per_second if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLoad:
    """A batch: B sequences that hold `stored_tokens` tokens in all, on N ranks."""

    batch: int
    stored_tokens: int
    num_ranks: int


def choose_variant(policy: str, load: DecodeLoad, model: ModelShape, rates: DecodeRates | None) -> str:
    """`gather` or `pass_q`. `policy` is one of VARIANT_POLICIES; "auto" takes `gather` unless pass-Q is predicted to be
    better by more than MARGIN, and always where nothing was measured. Raises ConfigError for an unknown policy.
    """
    if policy in VARIANTS:
        return policy
    if policy != "auto":
        raise ConfigError(f"decode variant is {policy!r}; allowed are {', '.join(VARIANT_POLICIES)}")
    if rates is None or load.num_ranks == 1 or not load.batch:
        return GATHER
    gather, pass_q = (predict_step(variant, load, model, rates) for variant in VARIANTS)
    return PASS_Q if pass_q < (1.0 - MARGIN) * gather else GATHER


def predict_step(variant: str, load: DecodeLoad, model: ModelShape, rates: DecodeRates) -> float:
    """Seconds of one step whose KV and rows lie evenly over the ranks."""
    batch, num_ranks, ring = load.batch, load.num_ranks, rates.ring
    peers = num_ranks - 1
    own_rows = batch if variant == GATHER else -(-batch // num_ranks)
    weight_rate = rates.weight_rate(num_ranks if variant == GATHER else min(batch, num_ranks), num_ranks)
    part_bytes = model.num_heads * (model.head_dim + 1) * model.partial_bytes
    attention = _attention(load, model, rates)
    if variant == GATHER:
        messages = rates.message_seconds(peers * batch * part_bytes)
    else:
        query = rates.message_seconds(own_rows * model.num_heads * model.head_dim * model.element_bytes)
        exposed = query - ring.overlap * min(query, attention / num_ranks)
        messages = peers * exposed + rates.message_seconds(peers * own_rows * part_bytes)
    tokens = rates.message_seconds(8 * own_rows) if variant == PASS_Q and peers else 0.0
    flops = rates.ring.gemm_flops
    linear, head = (
        _linear(own_rows, each, model.element_bytes, flops, weight_rate)
        for each in (model.linear_flops_per_token, model.head_flops)
    )
    return linear + head + model.num_layers * (attention + messages) + tokens


def _linear(rows: int, flops_per_row: int, element_bytes: int, flops: float, weight_rate: float) -> float:
    # A row takes two operations for every weight.
    return max(rows * flops_per_row / flops, flops_per_row / 2 * element_bytes / weight_rate)


def _attention(load: DecodeLoad, model: ModelShape, rates: DecodeRates) -> float:
    """One layer's, on one rank."""
    stored = load.stored_tokens / load.num_ranks
    return 2 * model.num_kv_heads * model.head_dim * model.element_bytes * stored / rates.kv_bytes_per_second

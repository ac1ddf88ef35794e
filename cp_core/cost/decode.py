"""Cost model of one decode step, and the choice of the variant that serves a batch. Pure Python, no torch.

Decode loops choose by it, and offline planning predicts by it.

B rows (sequences), N ranks, L layers, c context tokens a row, b rows that one rank computes:

    step = linear(b) + tensor parallel sums + L * (attention + messages + ring) + tokens

    gather: b = B            attention = call(B rows over c / N tokens)        messages = one gather of parts
    pass_q: b = ceil(B / N)  attention = N * call(B / N rows over c / N)       messages = (N-1) exposed hops + one
                                                                               all-to-all of parts
    helix:  b = B            attention = call(B rows over c / N tokens)        messages = one all-to-all of columns +
                                                                               two sums of hidden states

linear(b) is the slower of b rows of arithmetic and one reading of the weights. A call reads the KV of its rows. In
helix a rank computes and reads the projections of q, k and v, and 1 / N of all other weights. Pass-Q sends more
messages and computes N times fewer rows, so while reading the weights dominates, `gather` wins. The exception is a ring
whose ranks share one memory: with fewer rows than ranks, pass-Q leaves some ranks without rows, and the others then
read their weights faster. `ring` is the further cost of a layer in a ring, `tokens` the message with sampled tokens.
Pass-Q is arXiv 2411.01783, 4.3; gathered parts are vLLM's RFC 26133.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.cost.memory import WeightBytes
from ringserve.cp_core.cost.model import PASS_Q, ModelShape
from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.errors import ConfigError
from ringserve.views import RingRates

GATHER = "gather"
HELIX = "helix"
# Variants that a ring may choose at every step, and all. Helix cuts the weights when the ring starts.
STEP_VARIANTS = (GATHER, PASS_Q)
VARIANTS = (*STEP_VARIANTS, HELIX)
VARIANT_POLICIES = ("auto", *VARIANTS)

# Share by which pass-Q must be predicted to be better: it sends N times the messages, and every one may be late.
MARGIN = 0.05
TOKEN_BYTES = 8
# Batch sizes, and tokens of each sequence, whose predicted steps decide on helix when a ring starts.
START_BATCHES = (1, 8)
START_TOKENS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRates:
    """Rates of one rank in decode steps, measured by its ring or derived from a hardware profile.

    `ring` as in PrefillRates. `weight_bytes_per_second` is the rate at which a rank reads weights, multiplying one row,
    while all ranks do the same, `lone_weight_bytes_per_second` while only this rank does. `kv_bytes_per_second` is the
    rate at which one query's attention reads KV. `busy_message_seconds` is the time of a small message between ranks
    that were computing just before, which is longer than between ranks that wait for it.

    The fields below have values only if a profile gives them. A call takes `call_seconds`, its KV's reading, and
    `row_seconds` for every row after the first `free_rows`. The collective has the latency and rate of a hop unless it
    has its own. A ring of several ranks adds `ring_seconds` a layer, tensor parallelism `sum_seconds` a step.
    `is_padded` follows arXiv 2411.01783, 4.3: every rank attends ceil(B / N) rows, and sampled tokens need no message
    of their own.
    """

    ring: RingRates
    weight_bytes_per_second: float
    lone_weight_bytes_per_second: float
    kv_bytes_per_second: float
    busy_message_seconds: float
    call_seconds: float = 0.0
    free_rows: int = 0
    row_seconds: float = 0.0
    collective_seconds: float | None = None
    collective_bytes_per_second: float | None = None
    ring_seconds: float = 0.0
    sum_seconds: float = 0.0
    is_padded: bool = False

    def __post_init__(self) -> None:
        for name in ("weight_bytes_per_second", "lone_weight_bytes_per_second", "kv_bytes_per_second"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"{name} is {getattr(self, name)}; allowed is any rate above 0")
        if not self.busy_message_seconds >= 0.0:
            raise ConfigError(f"busy_message_seconds is {self.busy_message_seconds}; allowed is 0 or more")

    @classmethod
    def of_profile(cls, profile: HardwareProfile, model: ModelShape, tp: int) -> DecodeRates:
        """Return the rates of a process that a profile describes, one of `tp` that share each layer of `model`."""
        constants, links = profile.decode, profile.prefill
        # Two small sums a layer: their bytes are negligible beside their latency.
        latency = constants.sum_seconds + (profile.num_hosts(tp) - 1) * constants.host_seconds
        return cls(
            ring=RingRates(
                gemm_flops=links.gemm_flops,
                attention_flops=links.attention_flops,
                link_bytes_per_second=links.link_bytes_per_second,
                link_latency_seconds=constants.hop_seconds,
                overlap=0.0,
            ),
            weight_bytes_per_second=constants.weight_bytes_per_second,
            lone_weight_bytes_per_second=constants.weight_bytes_per_second,
            kv_bytes_per_second=constants.kv_bytes_per_second,
            busy_message_seconds=constants.hop_seconds,
            call_seconds=constants.attention_seconds,
            free_rows=constants.free_rows,
            row_seconds=constants.row_seconds,
            collective_seconds=constants.all_to_all_seconds,
            collective_bytes_per_second=links.all_to_all_bytes_per_second,
            ring_seconds=constants.ring_seconds,
            sum_seconds=2 * model.num_layers * latency if tp > 1 else 0.0,
            is_padded=True,
        )

    def weight_rate(self, num_reading: int, num_ranks: int) -> float:
        """Return the bytes a second of each of `num_reading` ranks that read weights; linear between one and all."""
        idle = (num_ranks - num_reading) / (num_ranks - 1) if num_ranks > 1 else 0.0
        return self.weight_bytes_per_second + idle * (self.lone_weight_bytes_per_second - self.weight_bytes_per_second)

    def message_seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        latency = max(self.busy_message_seconds, self.ring.link_latency_seconds)
        return latency + num_bytes / self.ring.link_bytes_per_second if num_bytes else 0.0

    def collective_message_seconds(self, num_bytes: float) -> float:
        """Return the time of a gather or all-to-all whose messages share a rank's link."""
        if self.collective_seconds is None or self.collective_bytes_per_second is None:
            return self.message_seconds(num_bytes)
        return self.collective_seconds + num_bytes / self.collective_bytes_per_second if num_bytes else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLoad:
    """Batch of B sequences that hold `stored_tokens` tokens in all, on N ranks."""

    batch: int
    stored_tokens: float
    num_ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Predicted seconds. Fields named `layer_` are one layer's, the columns of arXiv 2411.01783, table 8."""

    variant: str
    num_layers: int
    linear_seconds: float
    sum_seconds: float
    call_seconds: float
    layer_attention_seconds: float
    layer_hops_seconds: float
    layer_collective_seconds: float
    layer_ring_seconds: float
    token_seconds: float

    @property
    def layer_whole_seconds(self) -> float:
        """Attention and messages of one layer."""
        return self.layer_attention_seconds + self.layer_hops_seconds + self.layer_collective_seconds

    @property
    def total_seconds(self) -> float:
        """Time to the next token (TTIT)."""
        layer = self.layer_whole_seconds + self.layer_ring_seconds
        return self.linear_seconds + self.sum_seconds + self.num_layers * layer + self.token_seconds


def predict_step(
    variant: str, load: DecodeLoad, model: ModelShape, rates: DecodeRates, weight_bytes: float | None = None
) -> StepCost:
    """Return the cost of one step whose KV and rows lie evenly over the ranks.

    `model` is the share of one process, `weight_bytes` the weights that it reads in a step: all matrices of `model` in
    its own element size if None. Raises ConfigError for an unknown variant.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"decode variant is {variant!r}; allowed are {', '.join(VARIANTS)}")
    batch, num_ranks, has_all_rows = load.batch, load.num_ranks, variant != PASS_Q
    peers = num_ranks - 1
    own_rows = batch if has_all_rows else -(-batch // num_ranks)
    call_rows = own_rows if has_all_rows or rates.is_padded else batch / num_ranks
    call_tokens = load.stored_tokens / num_ranks * (call_rows / batch if batch else 0.0)
    call = _call_seconds(call_rows, call_tokens, model, rates)
    part_bytes = model.num_heads * (model.head_dim + 1) * model.partial_bytes
    hops = 0.0
    if not has_all_rows:
        query = rates.message_seconds(own_rows * model.num_heads * model.head_dim * model.attention_bytes)
        hops = peers * (query - rates.ring.overlap * min(query, call))
    flops_per_row = float(model.linear_flops_per_token + model.head_flops)
    if weight_bytes is None:
        # A row takes two operations for every weight.
        weight_bytes = flops_per_row / 2 * model.element_bytes
    collective = rates.collective_message_seconds(peers * own_rows * part_bytes)
    if variant == HELIX:
        share = _helix_share(model, num_ranks)
        flops_per_row *= share
        weight_bytes *= share
        collective = rates.collective_message_seconds(peers * own_rows * part_bytes / num_ranks)
        collective += 2 * rates.collective_message_seconds(peers * own_rows * model.hidden_size * model.element_bytes)
    weight_rate = rates.weight_rate(num_ranks if has_all_rows else min(batch, num_ranks), num_ranks)
    return StepCost(
        variant=variant,
        num_layers=model.num_layers,
        linear_seconds=max(own_rows * flops_per_row / rates.ring.gemm_flops, weight_bytes / weight_rate),
        sum_seconds=rates.sum_seconds,
        call_seconds=call,
        layer_attention_seconds=call if has_all_rows else num_ranks * call,
        layer_hops_seconds=hops,
        layer_collective_seconds=collective,
        layer_ring_seconds=rates.ring_seconds if peers else 0.0,
        token_seconds=(
            0.0 if variant == GATHER or rates.is_padded or not peers else rates.message_seconds(TOKEN_BYTES * own_rows)
        ),
    )


def _helix_share(model: ModelShape, num_ranks: int) -> float:
    """Return the part of the linear layers and the head that one rank of a helix ring computes and reads."""
    qkv = 2 * model.num_layers * model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    whole = qkv / (model.linear_flops_per_token + model.head_flops)
    return whole + (1.0 - whole) / num_ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class StartChoice:
    """Choice of a ring's weights when it starts, and the predictions behind it, in words."""

    is_helix: bool
    reason: str


def choose_at_start(model: ModelShape, rates: DecodeRates, num_ranks: int) -> StartChoice:
    """Choose helix for a ring, or whole weights with a choice at every step, by the predicted steps of START_BATCHES.

    Helix must be predicted to be better by more than MARGIN: it sends three messages a layer, and every one may be
    late.
    """
    loads = [
        DecodeLoad(batch=batch, stored_tokens=batch * START_TOKENS, num_ranks=num_ranks) for batch in START_BATCHES
    ]
    seconds = {
        variant: [predict_step(variant, load, model, rates).total_seconds for load in loads] for variant in VARIANTS
    }
    stepwise = [min(seconds[variant][place] for variant in STEP_VARIANTS) for place in range(len(loads))]
    is_helix = num_ranks > 1 and sum(seconds[HELIX]) < (1.0 - MARGIN) * sum(stepwise)
    times = [" and ".join(f"{each * 1e3:.3g}" for each in found) for found in (seconds[HELIX], stepwise)]
    batches = " and ".join(map(str, START_BATCHES))
    return StartChoice(
        is_helix=is_helix,
        reason=f"steps of {batches} sequences of {START_TOKENS:,} tokens are predicted to take {times[0]} ms by helix, "
        f"{times[1]} ms by the better of gather and pass_q",
    )


def choose_variant(policy: str, load: DecodeLoad, model: ModelShape, rates: DecodeRates | None) -> str:
    """Return the variant of a step by `policy`, one of VARIANT_POLICIES.

    "auto" takes `gather` unless pass-Q is predicted to be better by more than MARGIN. If nothing was measured, it takes
    `gather`. Raises ConfigError for an unknown policy.
    """
    if policy in VARIANTS:
        return policy
    if policy != "auto":
        raise ConfigError(f"decode variant is {policy!r}; allowed are {', '.join(VARIANT_POLICIES)}")
    if rates is None or load.num_ranks == 1 or not load.batch:
        return GATHER
    gather, pass_q = (predict_step(variant, load, model, rates).total_seconds for variant in STEP_VARIANTS)
    return PASS_Q if pass_q < (1.0 - MARGIN) * gather else GATHER


def predict_profiled_step(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    batch: int,
    context_tokens: float,
    variant: str = PASS_Q,
    num_drafts: int = 0,
) -> StepCost:
    """Return the cost of a step of `batch` sequences of `context_tokens`, on a ring of cp x tp processes.

    Each sequence has one row for its newest token and one per draft; these rows read its KV once. Raises ConfigError
    for an unknown variant.
    """
    load = DecodeLoad(batch=batch * (1 + num_drafts), stored_tokens=batch * context_tokens, num_ranks=cp)
    rates = DecodeRates.of_profile(profile, model, tp)
    return predict_step(variant, load, model.share(tp), rates, (weights.layers + weights.head) / tp)


def fastest_step(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    batch: int,
    context_tokens: float,
    num_drafts: int = 0,
) -> StepCost:
    """Return the cost of the variant for which `predict_profiled_step` gives the least time; helix needs tp 1."""
    steps = (
        predict_profiled_step(
            model,
            weights,
            profile,
            cp=cp,
            tp=tp,
            batch=batch,
            context_tokens=context_tokens,
            variant=variant,
            num_drafts=num_drafts,
        )
        for variant in (VARIANTS if tp == 1 else STEP_VARIANTS)
    )
    return min(steps, key=lambda step: step.total_seconds)


MAX_DRAFTS = 7
"""Maximum drafts of a sequence that one step checks, after its newest token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftedStep:
    """Predicted step that checks `num_drafts` drafts of each sequence, and the mean number of tokens that it gives."""

    cost: StepCost
    num_drafts: int
    tokens: float

    @property
    def ttit_seconds(self) -> float:
        """Mean time to a sequence's next token."""
        return self.cost.total_seconds / self.tokens


def fastest_drafted_step(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    batch: int,
    context_tokens: float,
    accepted_share: float,
) -> DraftedStep:
    """Return the step with the number of drafts that takes the least time per token.

    A draft counts only if all before it are right: k drafts that are each right with probability p, `accepted_share`,
    give 1 + p + ... + p^k tokens. If p is 0, no drafts are tried.
    """
    steps = []
    for num_drafts in range((MAX_DRAFTS if accepted_share else 0) + 1):
        cost = fastest_step(
            model, weights, profile, cp=cp, tp=tp, batch=batch, context_tokens=context_tokens, num_drafts=num_drafts
        )
        tokens = sum(accepted_share**place for place in range(num_drafts + 1))
        steps.append(DraftedStep(cost=cost, num_drafts=num_drafts, tokens=tokens))
    return min(steps, key=lambda step: step.ttit_seconds)


def _call_seconds(rows: float, tokens: float, model: ModelShape, rates: DecodeRates) -> float:
    """Return the time of one attention call of `rows` queries over `tokens` stored tokens in all."""
    kv_bytes = 2 * model.num_kv_heads * model.head_dim * model.attention_bytes * tokens
    return (
        rates.call_seconds + kv_bytes / rates.kv_bytes_per_second + max(0, rows - rates.free_rows) * rates.row_seconds
    )

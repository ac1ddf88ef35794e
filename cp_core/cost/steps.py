"""Prefill cost: seconds of a step by rates measured on its ring, and its work as one number. Pure Python.

The router's planner and the prefill scheduler predict by it.

T new tokens, P cached ones, N ranks, H query heads, K key/value heads, D head dimension, L layers, e bytes per element.

    seconds = linear(T / N) + L * (N * a + (N - 1) * (x - o * min(x, a)) + all_to_all + overhead)

a is the attention of one ring iteration, x the time of its message, and o the share of the shorter of the two that is
hidden behind the longer. With o = 1 the part of x that exceeds a is exposed, as in arXiv 2411.01783, 3.5 and appendix
A, to whose published times the form was fitted. If the processor that attends also moves the messages, o is less. The
caller passes all rates.

One *work unit* is the matrix products of one token. T new tokens after P earlier ones are

    work(T, P) = T + (T P + T (T + 1) / 2) / pairs_per_token

units. The second part is attention, of each new token over all before it and itself; `pairs_per_token` such pairs cost
as much as the matrix products of one token. The number follows from the model's shape alone, so a prompt has the same
work on every machine; each ring measures how many seconds a unit takes. The output head is left out, because a
prompt needs the logits of one token only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ringserve.cp_core.cost.chain import ChainPredictor
from ringserve.cp_core.cost.model import (
    CHAIN,
    GATHER_KV,
    PASS_KV,
    PASS_Q,
    PREFILL_ALGORITHMS,
    SP_NTP,
    ModelShape,
    PrefillRates,
)
from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.head_shares import head_shares
from ringserve.cp_core.layout.shards import TokenRange

SEGMENTS = (1, 2, 4, 8)
"""Numbers of segments of sp_ntp."""
LEAST_SEGMENT = 64
"""Least tokens of a segment: attention over fewer spends more time on its calls than it hides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillCost:
    """Predicted seconds over all layers, of one step or of several.

    `hidden_seconds` of communication are hidden behind attention. `sum_seconds` are for tensor parallelism, which
    the prediction of one rank leaves out.
    """

    linear_seconds: float
    attention_seconds: float
    exposed_seconds: float
    hidden_seconds: float
    all_to_all_seconds: float
    overhead_seconds: float
    sum_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole step or steps."""
        return (
            self.linear_seconds
            + self.sum_seconds
            + self.attention_seconds
            + self.exposed_seconds
            + self.all_to_all_seconds
            + self.overhead_seconds
        )

    def __add__(self, other: PrefillCost) -> PrefillCost:
        """Return the cost of both, one after the other."""
        return PrefillCost(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})


class StepPredictor:
    """Predictions of a model's steps on rings of one size and speed, by PREFILL_ALGORITHMS.

    Values that depend only on these are computed once: a router asks for many steps while it places one turn.
    """

    __slots__ = (
        "_collective",
        "_head_imbalance",
        "_head_seconds",
        "_hop_bytes",
        "_layers",
        "_message",
        "_num_ranks",
        "_overhead",
        "_pair_seconds",
        "_rates",
        "_return_bytes",
        "_share_bytes",
        "_token_seconds",
        "chain",
    )

    def __init__(self, model: ModelShape, rates: PrefillRates, num_ranks: int) -> None:
        self._rates = rates
        self._num_ranks = num_ranks
        self._layers = model.num_layers
        ring = rates.ring
        self._message = ring.link_latency_seconds, ring.link_bytes_per_second
        latency, rate = rates.all_to_all_latency_seconds, rates.all_to_all_bytes_per_second
        self._collective = self._message[0] if latency is None else latency, self._message[1] if rate is None else rate
        self.chain = ChainPredictor(model, rates, num_ranks)
        self._head_seconds = model.head_flops / rates.ring.gemm_flops
        self._token_seconds = model.linear_flops_per_token / rates.ring.gemm_flops
        # Seconds of one (query, key) pair in a ring iteration: its work is spread over N ranks and N iterations.
        self._pair_seconds = model.attention_flops(1, 0) / num_ranks**2 / rates.ring.attention_flops
        self._overhead = model.num_layers * rates.layer_overhead_seconds + rates.ring.step_seconds
        # Bytes of one token: its K and V or its queries in a hop, its partial outputs and LSE from all other ranks.
        self._hop_bytes = {
            PASS_KV: 2 * model.num_kv_heads * model.head_dim * model.attention_bytes,
            PASS_Q: model.num_heads * model.head_dim * model.attention_bytes,
        }
        self._return_bytes = (num_ranks - 1) * model.num_heads * (model.head_dim + 1) * model.partial_bytes
        # In sp_ntp, bytes per token sent by the busiest rank: queries, K and V, finished rows.
        shares = head_shares(num_ranks, model.num_heads, model.num_kv_heads)
        queries, keys = [len(each.heads) for each in shares], [len(each.kv_heads) for each in shares]
        head_bytes = model.head_dim * model.attention_bytes
        self._share_bytes = (
            (sum(queries) - min(queries)) * head_bytes,
            2 * (sum(keys) - min(keys)) * head_bytes,
            (num_ranks - 1) * max(queries) * head_bytes,
        )
        self._head_imbalance = max(queries) * num_ranks / model.num_heads

    def cost(self, algorithm: str, new_tokens: int, cached_tokens: int) -> PrefillCost:
        """Return the cost of T new tokens after P cached ones that lie evenly over the ranks.

        Raises ConfigError for an algorithm that is none of PREFILL_ALGORITHMS.
        """
        if algorithm not in PREFILL_ALGORITHMS:
            raise ConfigError(f"algorithm is {algorithm!r}; allowed are {', '.join(PREFILL_ALGORITHMS)}")
        iteration = self._iteration(new_tokens, cached_tokens)
        attention, messages, exposed, all_to_all = self._num_ranks * iteration, 0.0, 0.0, 0.0
        if algorithm == SP_NTP:
            all_to_all, _ = self._by_heads(new_tokens, cached_tokens)
        elif algorithm == CHAIN:
            # A chain's cuts are uneven and its messages hide behind whole layers, so only its total compares with the
            # others.
            exposed = self.chain.seconds(new_tokens, cached_tokens) / self._layers - attention
            exposed -= (self._linear(new_tokens) + self._overhead) / self._layers
            attention, exposed = attention + min(0.0, exposed), max(0.0, exposed)
            messages = exposed
        elif algorithm == GATHER_KV:
            messages = self._gather_seconds(new_tokens, cached_tokens)
            exposed = messages - self._rates.ring.overlap * min(messages, iteration)
        else:
            message, all_to_all = self._messages(algorithm, new_tokens, cached_tokens)
            messages, exposed = (self._num_ranks - 1) * message, self._exposed(message, iteration)
        return PrefillCost(
            linear_seconds=self._linear(new_tokens),
            attention_seconds=self._layers * attention,
            exposed_seconds=self._layers * exposed,
            hidden_seconds=self._layers * (messages - exposed),
            all_to_all_seconds=self._layers * all_to_all,
            overhead_seconds=self._overhead,
        )

    def seconds(self, new_tokens: int, cached_tokens: int) -> dict[str, float]:
        """Return the total seconds by algorithm, as `cost` predicts them."""
        # Each sum is as in `cost`, written out: a router calls this a dozen times while it places one turn.
        num_ranks, layers, overlap = self._num_ranks, self._layers, self._rates.ring.overlap
        iteration = (new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2) * self._pair_seconds
        same = self._linear(new_tokens) + layers * num_ranks * iteration + self._overhead
        if num_ranks == 1:
            return dict.fromkeys(PREFILL_ALGORITHMS, same)
        hops, own_tokens = num_ranks - 1, -(-new_tokens // num_ranks)
        latency, rate = self._message
        local_bytes = -(-(new_tokens + cached_tokens) // num_ranks) * self._hop_bytes[PASS_KV]
        message = latency + local_bytes / rate
        exposed = message - overlap * (message if message < iteration else iteration)
        pass_kv = same + layers * (hops * exposed)
        message = latency + own_tokens * self._hop_bytes[PASS_Q] / rate
        exposed = message - overlap * (message if message < iteration else iteration)
        all_to_all = self._collective[0] + own_tokens * self._return_bytes / self._collective[1]
        gathered = self._collective_seconds(hops * local_bytes)
        by_heads, _ = self._by_heads(new_tokens, cached_tokens)
        return {
            PASS_KV: pass_kv,
            PASS_Q: same + layers * (hops * exposed + all_to_all),
            GATHER_KV: same + layers * (gathered - overlap * (gathered if gathered < iteration else iteration)),
            CHAIN: self.chain.seconds(new_tokens, cached_tokens),
            SP_NTP: same + layers * by_heads,
        }

    def _gather_seconds(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds of a layer's messages of gather_kv."""
        stored = -(-(new_tokens + cached_tokens) // self._num_ranks)
        return self._collective_seconds((self._num_ranks - 1) * stored * self._hop_bytes[PASS_KV])

    def segments(self, new_tokens: int, cached_tokens: int) -> int:
        """Return the number of segments, one of SEGMENTS, by which sp_ntp is predicted to take least."""
        return self._by_heads(new_tokens, cached_tokens)[1]

    def _by_heads(self, new_tokens: int, cached_tokens: int) -> tuple[float, int]:
        """Return the seconds of a layer of sp_ntp beyond evenly shared attention, and the best number of segments."""
        attention = self._num_ranks * self._iteration(new_tokens, cached_tokens)
        alone = by_one = self._segmented(1, new_tokens, cached_tokens, attention)
        best = 1
        for number in SEGMENTS[1:]:
            if new_tokens < number * LEAST_SEGMENT:
                break
            seconds = self._segmented(number, new_tokens, cached_tokens, attention)
            seconds = alone - self._rates.ring.overlap * (alone - seconds)
            if seconds >= by_one:
                break
            by_one, best = seconds, number
        return by_one - attention, best

    def _segmented(self, number: int, new_tokens: int, cached_tokens: int, attention: float) -> float:
        """Return the seconds of a layer's all-to-alls and attention in `number` segments, all hidden that can be."""
        queries, keys, back = self._share_bytes
        own, stored = -(-new_tokens // self._num_ranks), -(-cached_tokens // self._num_ranks)
        each = own * (queries + keys) / number
        returning = self._collective_seconds(own * back / number)
        arrived = self._collective_seconds(each + stored * keys)
        attention *= self._head_imbalance
        if number == 1:
            return arrived + attention + returning
        coming, length = self._collective_seconds(each), new_tokens / number
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        attended = 0.0
        ends = []
        for segment in range(number):
            share = length * (cached_tokens + segment * length + (length + 1 / number) / 2) / pairs
            attended = max(attended, arrived + segment * coming) + share * attention
            ends.append(attended)
        returned = arrived + (number - 1) * coming
        for end in ends:
            returned = max(returned, end) + returning
        return returned

    def _collective_seconds(self, num_bytes: float) -> float:
        # The rate of an all-to-all was fitted to pass-Q's small messages and may be too high, so the link's bounds it.
        if not num_bytes:
            return 0.0
        message = self._message[0] + num_bytes / self._message[1]
        if self._collective == self._message:
            return message
        all_to_all = self._collective[0] + num_bytes / self._collective[1]
        return all_to_all if all_to_all > message else message

    def _linear(self, new_tokens: int) -> float:
        # The fullest rank, whose chunks hold the remainder, takes longest.
        return -(-new_tokens // self._num_ranks) * self._token_seconds + self._head_seconds

    def _iteration(self, new_tokens: int, cached_tokens: int) -> float:
        return (new_tokens * cached_tokens + new_tokens * (new_tokens + 1) // 2) * self._pair_seconds

    def _messages(self, algorithm: str, new_tokens: int, cached_tokens: int) -> tuple[float, float]:
        """Return the seconds of a hop's message and of the all-to-all, in one layer."""
        is_pass_q = algorithm == PASS_Q
        local_tokens = -(-(new_tokens if is_pass_q else new_tokens + cached_tokens) // self._num_ranks)
        message = self._rates.message_seconds(local_tokens * self._hop_bytes[algorithm])
        return message, self._rates.all_to_all_seconds(local_tokens * self._return_bytes) if is_pass_q else 0.0

    def _exposed(self, message: float, iteration: float) -> float:
        """Return the seconds of one layer's hops that are not hidden behind attention."""
        return (self._num_ranks - 1) * (message - self._rates.ring.overlap * min(message, iteration))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkModel:
    """Work of one model. `flops_per_unit` is the FLOP of one token's matrix products in all layers."""

    pairs_per_token: float
    flops_per_unit: float

    @classmethod
    def of_shape(cls, shape: ModelShape) -> WorkModel:
        """Return the work model of a model's shape."""
        pair = shape.num_layers * shape.attention_flops(1, 0)
        linear = shape.linear_flops_per_token
        return cls(pairs_per_token=linear / pair, flops_per_unit=linear)

    def work(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the work units of T new tokens after P cached ones."""
        pairs = new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2
        return new_tokens + pairs / self.pairs_per_token

    def longest(self, budget: float, cached_tokens: int) -> int:
        """Return the most tokens after `cached_tokens` whose work is at most `budget`; 0 if one is too many."""
        if budget <= 0:
            return 0
        # T^2 / 2 + T b = c, in the form of its root that does not cancel; then exact to the token.
        b, c = self.pairs_per_token + cached_tokens + 0.5, budget * self.pairs_per_token
        tokens = int(2 * c / (b + math.sqrt(b * b + 2 * c)))
        while tokens and self.work(tokens, cached_tokens) > budget:
            tokens -= 1
        while self.work(tokens + 1, cached_tokens) <= budget:
            tokens += 1
        return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """Step limits: `budget` work units and `tokens` new tokens over all its turns.

    A turn that is cut gets at least `min_chunk` tokens, whatever they cost: far into a long prompt a step would
    otherwise compute a few tokens and move the KV of all others for them.
    """

    budget: float
    tokens: int
    min_chunk: int

    @classmethod
    def of(
        cls,
        work: WorkModel,
        *,
        step_budget: float,
        chunk_tokens: int,
        min_chunk_tokens: int,
        most_work: float = math.inf,
    ) -> StepLimits:
        """Return limits by a ring's settings, of `most_work` units at most.

        `step_budget` 0 is the work of `chunk_tokens` tokens with nothing before them. The least chunk is at most a
        quarter of `chunk_tokens`, so that a step has room for more than one turn.
        """
        return cls(
            budget=max(1.0, min(step_budget or work.work(chunk_tokens, 0), most_work)),
            tokens=chunk_tokens,
            min_chunk=max(1, min(min_chunk_tokens, chunk_tokens // 4)),
        )


def cut(work: WorkModel, limits: StepLimits, tokens: TokenRange) -> list[TokenRange]:
    """Cut a prompt that has the ring to itself into steps. Later ones are shorter, as each token attends to more."""
    chunks, start = [], tokens.start
    while start < tokens.stop:
        length = min(limits.tokens, max(limits.min_chunk, work.longest(limits.budget, start)))
        chunks.append(TokenRange(start, min(tokens.stop, start + length)))
        start += length
    return chunks

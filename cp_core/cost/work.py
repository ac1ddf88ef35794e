"""Work of prefill as one number, and the cut of prompts into steps by it. Pure Python.

One *work unit* is the matrix products of one token. T new tokens after P earlier ones are

    work(T, P) = T + (T P + T (T + 1) / 2) / pairs_per_token

units. The second part is attention, of each new token over all before it and itself; `pairs_per_token` such pairs cost
as much as the matrix products of one token. The number follows from the model's shape alone, so a prompt has the same
work on every machine; the seconds of a unit are measured where they matter. Logits are left out: a prompt needs those
of one token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.layout.shards import TokenRange


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
    """Limits of one step: `budget` work units and `tokens` new tokens over all its turns.

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

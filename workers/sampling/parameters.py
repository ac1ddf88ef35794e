"""Sampling parameters, token history and sampled tokens of one sequence. Plain data, which leaders read too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Bias added to one token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens that follow each other."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """Sampling parameters of a turn. Temperature 0 is greedy; else `seed` draws from softmax(logits / temperature).

    The draw at position p depends only on (seed, p), so it is the same for every ring size and batch. `stop_token_ids`
    includes the model's end-of-sequence ids unless the caller ignores them. `top_k` 0 disables the filter.
    `workers.sampling.sampler` has the formulas and their order. `logprobs` and `prompt_logprobs` are the number of top
    tokens reported besides the chosen token; None means no log-probabilities. With `ends_by_text`, the reader of the
    tokens decides where the answer ends. `grammar` is an llguidance grammar for the answer; empty means none. Only
    `allowed_ids` are drawn unless they are empty, and no token that would complete one of the `banned` sequences. A
    step checks at most `max_drafts` drafts of next tokens; None means as many as are worth their time. Drafts never
    change which tokens are drawn.

    Example: `SamplingParameters(temperature=0.7, seed=1)` draws the same tokens on any ring.
    """

    temperature: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[TokenBias, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ends_by_text: bool = False
    grammar: str = ""
    max_drafts: int | None = None
    allowed_ids: tuple[int, ...] = ()
    banned: tuple[TokenSequence, ...] = ()

    @property
    def looks_at_prompt(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def looks_at_answer(self) -> bool:
        """True if earlier tokens of the answer change the logits."""
        has_penalty = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.looks_at_prompt or has_penalty or any(len(each.token_ids) > 1 for each in self.banned)

    @property
    def changes_logits(self) -> bool:
        """True if even a greedy choice may differ from the raw logits' choice."""
        return (
            self.looks_at_answer or bool(self.logit_bias or (self.min_tokens and self.stop_token_ids)) or self.is_masked
        )

    @property
    def is_masked(self) -> bool:
        """True if a row may have no possible token."""
        return bool(self.grammar or self.allowed_ids or self.banned)

    @property
    def filters(self) -> bool:
        """True if some tokens are never drawn. A greedy choice is never one of them."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHistory:
    """Tokens that penalties and grammars read: the prompt's distinct tokens, and the answer so far, in order.

    Both are empty if no parameter needs them. `num_generated` always counts the answer's tokens.
    """

    num_generated: int = 0
    prompt_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParameters, prompt: Iterable[int], answer: Sequence[int] = ()) -> TokenHistory:
        """Return the history that `sampling` needs from a whole prompt and the answer so far."""
        return cls(
            num_generated=len(answer),
            prompt_ids=tuple(sorted({int(token) for token in prompt})) if sampling.looks_at_prompt else (),
            answer_ids=tuple(answer) if sampling.looks_at_answer or sampling.grammar else (),
        )


NO_HISTORY = TokenHistory()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log softmax of the raw logits at one position, for the chosen token and the most likely tokens.

    `rank` 1 is the most likely token. `top_ids` descend by probability; equal ones ascend by id.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled token, with `logprobs` if requested.

    The token is None if the row's logits are not finite, or, with `is_outside_grammar`, if its masks allow no token.
    Unless it `is_reached`, this draft or an earlier one is wrong, and the token is ignored.
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    is_outside_grammar: bool = False
    is_reached: bool = True


NO_TOKEN = Sampled(None)
"""Outcome of a row with non-finite logits."""
OUTSIDE_GRAMMAR = Sampled(None, is_outside_grammar=True)
"""Outcome of a row whose grammar became too complex, or with masks that allow no token of the vocabulary."""
NOT_REACHED = Sampled(None, is_reached=False)
"""Outcome of the row of a wrong draft, and of the rows after it."""

"""How a caller wants tokens drawn, and what a draw looks back at. Pure data: leaders read it too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Added to one token's logit."""

    token_id: int
    bias: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParameters:
    """How tokens are chosen. temperature 0 is greedy; otherwise softmax(logits / temperature) drawn by `seed`.

    The draw at position p depends only on (seed, p), so it is the same for every ring size and batch.
    `stop_token_ids` includes the model's end-of-sequence ids unless the caller ignores them. `top_k` 0 keeps all.
    `workers.sampling.processors` has the formulas and their order. `logprobs` and `prompt_logprobs` ask for those of
    so many most likely tokens beside the chosen one's; None asks for none. With `ends_by_text` the reader of the
    tokens says where the answer ends.
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

    @property
    def looks_at_prompt(self) -> bool:
        return self.repetition_penalty != 1.0

    @property
    def looks_at_answer(self) -> bool:
        return self.looks_at_prompt or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether even a greedy choice may differ from that of the model's logits."""
        return self.looks_at_answer or bool(self.logit_bias) or bool(self.min_tokens and self.stop_token_ids)

    @property
    def filters(self) -> bool:
        """Whether some tokens are never drawn. A greedy choice is never among these."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHistory:
    """The tokens that a sampling looks back at: the prompt's distinct ones, and the answer's so far, in any order.

    Empty where no penalty needs them, which is why `num_generated` stands by itself: the answer's tokens so far.
    """

    num_generated: int = 0
    prompt_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, sampling: SamplingParameters, prompt: Iterable[int], answer: Sequence[int] = ()) -> TokenHistory:
        """What `sampling` needs of a whole prompt and the answer so far."""
        return cls(
            num_generated=len(answer),
            prompt_ids=tuple(sorted({int(token) for token in prompt})) if sampling.looks_at_prompt else (),
            answer_ids=tuple(answer) if sampling.looks_at_answer else (),
        )


NO_HISTORY = TokenHistory()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """log softmax of the model's logits, before any processing, at one token: its own, and of the most likely ones.

    `rank` 1 is the most likely token. `top_ids` descend by probability, equals ascend by id.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token; `logprobs` where the sampling asks for them."""

    token_id: int
    logprobs: TokenLogprobs | None = None

"""Commands to a decode loop, executed between two steps of its batch, and the loop's events. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from ringserve.cp_core.layout.shards import ShardMap
from ringserve.workers.protocol.prefill_steps import TokenIds
from ringserve.workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory, TokenLogprobs

DRAFT_TEXT_TOKENS = 1 << 18
"""Newest tokens of a sequence from which next tokens are drafted: comparing as many takes 0.1 ms."""
NO_TEXT: TokenIds = np.empty(0, dtype=np.int64)
ONE_TOKEN = TokenHistory(num_generated=1)
"""History of a turn that has only the prefill ring's token and no parameter that reads history."""


class FinishReason(StrEnum):
    """Reason why a sequence left the decode batch."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitSequence:
    """Command to admit a sequence to the decode batch.

    `token_id` at `position` is the newest token. Its KV is not computed yet. Rank r stores `held[r]` tokens in the
    blocks of its table `blocks[r]`. A sequence without a slot for its next token leaves as starved.
    `history.num_generated` counts the answer's tokens, including the prefill ring's first token. Drafts of next tokens
    come from `text`, all tokens up to the newest; without it the sequence has none. `tail` has the places of the newest
    held tokens, `ModelInfo.tail_tokens` of them.
    """

    sequence_id: str
    token_id: int
    position: int
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParameters
    history: TokenHistory = ONE_TOKEN
    text: TokenIds = field(default_factory=lambda: NO_TEXT, compare=False, repr=False)
    tail: ShardMap | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveSequence:
    """Command to remove a sequence from the decode batch or the waiting prompts at the next step boundary.

    The loop answers with an event with FinishReason.ABORT.
    """

    sequence_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowSequence:
    """Command to append `blocks[r]` to rank r's table at the next step boundary. Ignored if the sequence has left."""

    sequence_id: str
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrompt:
    """Command to compute a sequence's new tokens in one prefill step between two decode steps.

    Rank r stores `held[r]` tokens, and its table `blocks[r]` has room for its share of the new tokens by
    `balanced_layout`. The loop answers with an event with the next token. The sequence does not join the batch. `tail`
    has the places of the newest held tokens, `ModelInfo.tail_tokens` of them.
    """

    sequence_id: str
    token_ids: TokenIds
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParameters
    history: TokenHistory = NO_HISTORY
    tail: ShardMap | None = None


DecodeCommand = AdmitSequence | RemoveSequence | GrowSequence | ComputePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvent:
    """One token of a sequence, its end, or both. `kv_tokens` positions have stored KV after this step.

    `owner` is the rank that stores the KV that a batch step added; None in all other events. `is_draft`: the
    token follows a draft that was right, so it cost no step. `is_starved`: the sequence left because its block tables
    are full, and may join again. `is_broken`: it left without a token because its logits are not finite, or because its
    grammar allowed none (`is_outside_grammar`). `prompt_seconds`: the token is the first
    after a prompt, whose step took this time.
    """

    sequence_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    kv_tokens: int
    owner: int | None = None
    is_draft: bool = False
    is_starved: bool = False
    is_broken: bool = False
    is_outside_grammar: bool = False
    logprobs: TokenLogprobs | None = None
    prompt_seconds: float | None = None

    @property
    def has_left(self) -> bool:
        """True if the sequence is out of the batch."""
        return self.is_starved or self.is_broken or self.finish_reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvents:
    """Events from cursor `start` on. The next poll asks from `stop`; repeating one from `start` returns them again."""

    start: int
    stop: int
    events: tuple[DecodeEvent, ...]

"""Commands to a decode loop, followed between two steps of its batch, and the loop's events. Frozen data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ringserve.workers.protocol.prefill_steps import TokenIds
from ringserve.workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory, TokenLogprobs

ONE_TOKEN = TokenHistory(num_generated=1)
"""History of a turn that has the prefill ring's token only and looks back at nothing."""


class FinishReason(StrEnum):
    """Reason for which a sequence left the decode batch."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitSequence:
    """Order to admit a sequence to the decode batch.

    `token_id` at `position` is the newest token; its KV is not computed yet. Rank r stores `held[r]` tokens under its
    table `blocks[r]`. A sequence whose next token has no slot leaves as starved. `history.num_generated` counts the
    answer's tokens so far, the prefill ring's first token among them.
    """

    sequence_id: str
    token_id: int
    position: int
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParameters
    history: TokenHistory = ONE_TOKEN


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveSequence:
    """Order to remove a sequence from the decode batch, or from the waiting prompts, at the next step boundary.

    The answer is an event with FinishReason.ABORT.
    """

    sequence_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowSequence:
    """Order to append `blocks[r]` to rank r's table at the next step boundary. Ignored for a sequence that has left."""

    sequence_id: str
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrompt:
    """Order to compute tokens after a sequence's stored ones, in one prefill step between two decode steps.

    Rank r stores `held[r]` tokens, and its table `blocks[r]` has room for its share of the new ones by
    `balanced_layout`. The answer is an event with the token after them; the sequence does not join the batch.
    """

    sequence_id: str
    token_ids: TokenIds
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParameters
    history: TokenHistory = NO_HISTORY


DecodeCommand = AdmitSequence | RemoveSequence | GrowSequence | ComputePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvent:
    """One token, or the end, or both, of a sequence. `kv_tokens` positions have their KV stored after this step.

    `owner` is the rank that stores the KV which a step of the batch added; None in all other events. `is_starved`: the
    sequence left because its block tables are full, and may join again. `is_broken`: it left because its logits are not
    finite, without a token, or its grammar allowed none (`is_outside_grammar`). `prompt_seconds`: the token is the
    first after a prompt, and is the time of that prompt's step.
    """

    sequence_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    kv_tokens: int
    owner: int | None = None
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
    """Events from cursor `start` on. The next poll asks from `stop`; a repeated one from `start` returns them again."""

    start: int
    stop: int
    events: tuple[DecodeEvent, ...]

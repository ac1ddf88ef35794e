"""What a decode loop is told between two steps of its batch, and what it tells. Frozen data that crosses processes."""

from __future__ import annotations

from dataclasses import dataclass

from workers.protocol.steps import FinishReason
from workers.sampling.parameters import NO_HISTORY, Sampling, TokenHistory, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmitSequence:
    """Join the decode batch. `token_id` at `position` is the newest token, its KV not computed yet.

    `held[r]` tokens lie on rank r; `blocks[r]` is rank r's table. A sequence whose next token has no place pauses.
    `num_generated` tokens of the turn exist already (the prefill ring's first token counts); `history` holds them where
    the sampling looks back at them.
    """

    sequence_id: str
    token_id: int
    position: int
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: Sampling
    num_generated: int = 1
    history: TokenHistory = NO_HISTORY


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoveSequence:
    """Leave the decode batch, or the prompts that wait, at the next step border; answered by an event with
    FinishReason.ABORT.
    """

    sequence_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowSequence:
    """Append `blocks[r]` to rank r's table at the next step border. One that left meanwhile is passed over."""

    sequence_id: str
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrompt:
    """Compute tokens that follow what the ring holds of a sequence, in one step between two of the batch.

    `held[r]` tokens lie on rank r, whose table `blocks[r]` has room for its share of the new ones as `balanced_layout`
    lays them. Answered by an event with the token after them; the sequence does not join the batch by it.
    """

    sequence_id: str
    token_ids: tuple[int, ...]
    held: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    sampling: Sampling
    history: TokenHistory = NO_HISTORY


DecodeCommand = AdmitSequence | RemoveSequence | GrowSequence | ComputePrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvent:
    """One token, or the end, or both, of a sequence. `kv_tokens` positions have their KV stored after this step.

    `is_paused`: it left because its block tables are full, and may join again. `prompt_seconds`: the token is the first
    after a prompt, which was computed in a step of so many seconds.
    """

    sequence_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    kv_tokens: int
    is_paused: bool = False
    logprobs: TokenLogprobs | None = None
    prompt_seconds: float | None = None

    @property
    def has_left(self) -> bool:
        """Whether the sequence is out of the batch."""
        return self.is_paused or self.finish_reason is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeEvents:
    """Events from cursor `start` on; ask next from `stop`. Asking again from `start` returns the same events."""

    start: int
    stop: int
    events: tuple[DecodeEvent, ...]

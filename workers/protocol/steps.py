"""Prefill steps of a ring, and commands to a decode loop between two steps of its batch. Plain data, no torch.

A leader sends them to its ranks, which answer with outputs and events. `sequence_id` is the id of the turn to which a
sequence of a step belongs. The leader owns the block tables: a rank never allocates. `blocks[i]` holds the tokens with
stored index [i * block_tokens, (i + 1) * block_tokens) of that rank's shard of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from ringserve.cp_core.cost.model import PREFILL_ALGORITHMS
from ringserve.cp_core.layout.shards import PrefillLayout, ShardMap
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.workers.protocol.transfers import KvSend
from ringserve.workers.sampling.parameters import NO_HISTORY, SamplingParameters, TokenHistory, TokenLogprobs

TokenIds = npt.NDArray[np.int64]
DRAFT_TEXT_TOKENS = 1 << 18
"""Number of newest tokens of a sequence from which next tokens are drafted: comparing that many takes 0.1 ms."""
NO_TEXT: TokenIds = np.empty(0, dtype=np.int64)
ONE_TOKEN = TokenHistory(num_generated=1)
"""History of a turn that has only the prefill ring's token and no parameter that reads history."""


class Algorithm(StrEnum):
    """Algorithm for a turn's new tokens: on a prefill ring, named by its messages, or on the decode ring."""

    PASS_KV = "pass_kv"
    PASS_Q = "pass_q"
    GATHER_KV = "gather_kv"
    CHAIN = "chain"
    SP_NTP = "sp_ntp"
    DECODE_RING = "decode_ring"


RING_ALGORITHMS = tuple(map(Algorithm, PREFILL_ALGORITHMS))
"""Attention algorithms of a prefill step. A prefill step on a decode ring uses pass-Q, since the keys are there."""
CALIBRATED_ALGORITHMS = (Algorithm.PASS_KV, Algorithm.PASS_Q, Algorithm.CHAIN)
"""Algorithms whose measured times give all rates: the first two give the ring's rates, the chain gives its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScore:
    """Request for the log-probabilities of prompt tokens, each with the `num_top` most likely tokens.

    `following` is the prompt token after the step's last token, or None at the end of the prompt.
    """

    num_top: int
    following: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePrefill:
    """One sequence of a prefill step on one rank. The layout is common to all ranks; `blocks` and `sends` are its own.

    `token_ids` has all new tokens of this step, in order. Rank r already holds `cached[r]` tokens. `sample` is set on
    the step with the prompt's last token, and `history` has the tokens that sampling reads. `sends` leave layer by
    layer, as soon as a layer's KV is written. `score` requests log-probabilities of prompt tokens. `stored` says which
    rank stores each new token if this differs from the computing rank, which occurs only in chains. A sequence with
    `sparsity` gets approximate KV, computed by pass-KV. `tail` has the places of the newest held tokens,
    `ModelInfo.tail_tokens` of them.
    """

    sequence_id: str
    token_ids: TokenIds
    layout: PrefillLayout
    cached: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: SamplingParameters | None = None
    sends: tuple[KvSend, ...] = ()
    history: TokenHistory = NO_HISTORY
    score: PromptScore | None = None
    stored: ShardMap | None = None
    sparsity: Sparsity | None = None
    tail: ShardMap | None = None

    def stored_on(self, rank: int) -> int:
        """Return the number of new tokens that a rank stores."""
        return self.layout.tokens_on(rank) if self.stored is None else self.stored.held[rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """One forward pass of the ring over the new tokens of some sequences.

    Step numbers of a ring ascend. If a step `yields`, the ranks compute another step between its layers as soon as all
    ranks know it: a step whose `within` is the number of the yielding step. If that step has no sequences, it ends the
    yielding step. `order` lists the ranks along a chain (empty: 0, 1, 2, ...). `num_segments` applies to sp_ntp.
    """

    algorithm: Algorithm
    sequences: tuple[SequencePrefill, ...]
    number: int = 0
    yields: bool = False
    within: int = 0
    order: tuple[int, ...] = ()
    num_segments: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOutput:
    """Output of one rank, by sequence: the tokens sampled here, with `logprobs` if requested.

    A rank samples the sequences whose last position it owns. A token is None if the sequence's logits are not finite.
    `scores` has, by sequence and position, the log-probabilities of prompt tokens whose predecessor this rank computed.
    """

    tokens: dict[str, int | None] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    scores: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    seconds: float = 0.0
    wait_seconds: float = 0.0


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

    `owner` is the rank that stores the KV that a batch step added; None in all other events. `is_draft`: the token
    follows a draft that was right, so it cost no step. `is_starved`: the sequence left because its block tables are
    full, and may join again. `is_broken`: it left without a token because its logits are not finite, or because its
    grammar allowed none (`is_outside_grammar`). `prompt_seconds`: the token is the first after a prompt, and the
    prompt's step took this time.
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

"""Prefill steps of a ring: the leader's command to a rank, and the rank's output. Plain data, no torch.

The leader owns the block tables: a rank never allocates. `blocks[i]` holds the tokens with stored index
[i * block_tokens, (i + 1) * block_tokens) of that rank's shard of the sequence.
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


class Algorithm(StrEnum):
    """Algorithm for a turn's new tokens: on a prefill ring, named by what its ranks send, or on the decode ring."""

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
    rank stores each new token if this differs from the computing rank, as only in chains. A sequence with `sparsity`
    gets approximate KV, computed by pass-KV. `tail` has the places of the newest held tokens, `ModelInfo.tail_tokens`
    of them.
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

"""Prefill step of a ring: the leader's order to a rank and the rank's output. Pure data: no torch.

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
    """Algorithm for a turn's new tokens: on a prefill ring, by what its ranks send; or on the turn's decode ring."""

    PASS_KV = "pass_kv"
    PASS_Q = "pass_q"
    GATHER_KV = "gather_kv"
    CHAIN = "chain"
    SP_NTP = "sp_ntp"
    DECODE_RING = "decode_ring"


RING_ALGORITHMS = tuple(map(Algorithm, PREFILL_ALGORITHMS))
"""Algorithms of a prefill step's attention. A prefill step on a decode ring uses pass-Q: the keys are there."""
CALIBRATED_ALGORITHMS = (Algorithm.PASS_KV, Algorithm.PASS_Q, Algorithm.CHAIN)
"""Algorithms whose measured times give the rates from which the times of all follow: the first two those of the ring,
the chain what it alone has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScore:
    """Request for the log-probabilities of prompt tokens, each beside the `num_top` most likely tokens.

    `following` is the prompt's token after the step's last token, None at the end of the prompt.
    """

    num_top: int
    following: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePrefill:
    """One sequence of a prefill step for one rank: the layout is common to all ranks, `blocks` and `sends` are its own.

    `token_ids` are all new tokens of this step, in order. Rank r already holds `cached[r]` tokens. `sample` is set on
    the step with the prompt's last token, and `history` holds the tokens that the sampling looks back at. `sends` leave
    layer by layer, as soon as a layer's KV is written. `score` asks for log-probabilities of the prompt's tokens.
    `stored` says where the new tokens are stored if not all of them are where they are computed: in chains alone.
    A sequence with a `sparsity` gets approximate KV; pass-KV computes its step.
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

    def stored_on(self, rank: int) -> int:
        """Return the number of new tokens that a rank stores."""
        return self.layout.tokens_on(rank) if self.stored is None else self.stored.held[rank]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """One forward pass of the ring over the new tokens of some sequences.

    Steps of a ring have rising numbers. Between the layers of a step that `yields`, the ranks compute a step that is
    `within` it, by its number, as soon as all of them know of one. Without sequences, that step ends the present one.
    `order` are the ranks along a chain; empty: as they are numbered. `num_segments` are those of sp_ntp.
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
    """Output of one rank, by sequence: the tokens sampled here, with `logprobs` for the sequences that ask for them.

    A token is None where the sequence's logits are not finite.

    A rank samples the sequences whose last position it owns. `scores` holds, by sequence and position, the
    log-probabilities of the prompt tokens whose predecessors this rank computed.
    """

    tokens: dict[str, int | None] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    scores: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    seconds: float = 0.0
    wait_seconds: float = 0.0

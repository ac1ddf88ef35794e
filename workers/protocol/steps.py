"""What a ring leader tells a rank, and what a rank answers. Pure data: no torch, so leaders stay small. What a decode
loop is told between its steps is in `decode_commands`.

Block tables are leader-owned: a rank never allocates. `blocks[i]` holds the tokens with stored index
[i * block_tokens, (i + 1) * block_tokens) of that rank's shard of the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cp_core.cost.model import ModelShape
from cp_core.layout.reshard import KvPiece as KvPiece
from cp_core.layout.shards import PrefillLayout, TokenRange
from cp_core.transport.peer_tls import PeerTls
from workers.sampling.parameters import NO_HISTORY as NO_HISTORY
from workers.sampling.parameters import Sampling as Sampling
from workers.sampling.parameters import TokenHistory as TokenHistory
from workers.sampling.parameters import TokenLogprobs as TokenLogprobs

TokenIds = npt.NDArray[np.int64]


class Algorithm(StrEnum):
    """How a turn's new tokens are computed: on a prefill ring, by what goes round it, or where their turn decodes."""

    PASS_KV = "pass_kv"
    PASS_Q = "pass_q"
    DECODE_RING = "decode_ring"


RING_ALGORITHMS = (Algorithm.PASS_KV, Algorithm.PASS_Q)
"""How a prefill step attends over its ring. One on a decode ring takes pass-Q: the keys are there."""


class FinishReason(StrEnum):
    """Why a sequence left the decode batch."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """What a rank needs to start. `num_blocks` blocks of `block_tokens` tokens for every layer.

    `num_ranks` is cp * tp and `rank` is cp_rank * tp + tp_rank: the tp ranks of one cp rank hold the same tokens, each
    its own share of the heads. With `tls` all that ranks send each other is encrypted, as far as `ring_transport` can.
    """

    role: str
    ring: str
    rank: int
    num_ranks: int
    tp: int = 1
    incarnation: str
    model_path: str
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    ring_transport: str = "auto"
    num_blocks: int
    block_tokens: int
    kv_checksums: bool = True
    num_threads: int = 1
    listen_host: str = "127.0.0.1"
    tls: PeerTls | None = None
    max_batch: int = 32
    decode_variant: str = "auto"

    @property
    def cp(self) -> int:
        """Ranks that share a sequence's tokens: the size of the ring."""
        return self.num_ranks // self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The shape of a model, as the planner and the KV pool see it. Sizes in elements, bytes where named so."""

    name: str
    model_type: str
    dtype: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    num_parameters: int
    element_bytes: int
    eos_token_ids: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        """The sizes, as cost models take them."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            element_bytes=self.element_bytes,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """A started rank. `kv_endpoint` is HOST:PORT of its KV receiver."""

    rank: int
    kv_endpoint: str
    attention_backend: str
    ring_transport: str
    pid: int
    model: ModelInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDoors:
    """Where one rank waits for others of its ring, each HOST:PORT or empty.

    `tokens` is for those that hold other tokens, `heads` for those that hold other heads. Where the ring's transport
    meets in a store instead, the first rank's `store` is that.
    """

    tokens: str = ""
    heads: str = ""
    store: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSpec:
    """How the ranks of one ring meet: the doors of all by rank, and a secret by which they know each other."""

    name: str
    doors: tuple[RankDoors, ...]
    secret: str = field(repr=False)
    timeout_seconds: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRates:
    """What a ring measured of itself. FLOP/s per rank, bytes/s per direction, seconds per message.

    `overlap` is the share of communication that passes behind attention, 0 to 1.
    """

    gemm_flops: float
    attention_flops: float
    link_bytes_per_second: float
    link_latency_seconds: float
    overlap: float = 1.0


# --- KV transfer -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransferKey:
    """Names one attempt of one transfer between the incarnations of two rings. Anything else is stale."""

    transfer_id: str
    attempt: int
    source: str
    destination: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockPair:
    """Block `destination` of a rank's cache is to get what block `source` holds, in every layer."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class KvPart:
    """What one source rank sends to one destination rank (endpoint HOST:PORT), the same for every layer."""

    endpoint: str
    pieces: tuple[KvPiece, ...]


@dataclass(frozen=True, slots=True)
class KvSend:
    """One source rank's share of a transfer. `blocks` is its own block table of the sequence."""

    key: TransferKey
    blocks: tuple[int, ...]
    parts: tuple[KvPart, ...]


@dataclass(frozen=True, slots=True)
class KvExpect:
    """One destination rank's share: `ranges` (positions, ascending) go to stored indices from `stored_start` on.

    The rank seals when every (token, layer, head) of it arrived exactly once; an empty share is sealed at once.
    """

    key: TransferKey
    ranges: tuple[TokenRange, ...]
    stored_start: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What one side of a transfer saw. Seconds from the first to the last byte of this rank."""

    payload_bytes: int
    seconds: float


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScore:
    """Asks how likely the prompt's tokens were, with the `num_top` most likely ones beside each.

    `following` is the prompt's token after the step's last one, None where there is none.
    """

    num_top: int
    following: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SequencePrefill:
    """One sequence of a prefill step, as one rank gets it: the layout is common, `blocks` and `sends` its own.

    `token_ids` are all new tokens of this step, in order. `cached[r]` is what rank r already holds. `sample` is set
    on the step that holds the prompt's last token, with what it looks back at in `history`. `sends` leave layer by
    layer, as soon as a layer's KV is written. `score` asks for log-probabilities of the prompt's tokens.
    """

    sequence_id: str
    token_ids: TokenIds
    layout: PrefillLayout
    cached: tuple[int, ...]
    blocks: tuple[int, ...]
    sample: Sampling | None = None
    sends: tuple[KvSend, ...] = ()
    history: TokenHistory = NO_HISTORY
    score: PromptScore | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """One forward pass of the ring over the new tokens of some sequences."""

    algorithm: Algorithm
    sequences: tuple[SequencePrefill, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOutput:
    """`tokens` holds the sampled token of the sequences whose last position this rank owns, `logprobs` those asked for.

    `scores` holds, by sequence and position, how likely prompt tokens were whose predecessors this rank computed.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    scores: dict[str, dict[int, TokenLogprobs]] = field(default_factory=dict)
    seconds: float = 0.0
    wait_seconds: float = 0.0


# --- decode ----------------------------------------------------------------------------------------------------------


STEP_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.1, 0.15),
    *(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0),
)
"""Seconds: decode steps take those of the first line, prefill steps up to those of the second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Progress, for watchdogs: a step counter and the seconds since it last moved.

    `decode_variant` served the latest decode step: `gather` or `pass_q`, empty before the first. `step_seconds` is the
    time in steps, `wait_seconds` the part of it in which the rank waited for peers, `communication_seconds` that in
    which messages of the ring were under way (None: its transport cannot tell), `bytes_sent` what it sent.
    `step_counts` are its steps by length, see `StepClock`.
    `stalled_seconds` is the longest time for which a transfer that has begun, and is not whole, got no byte.
    """

    steps: int
    seconds_since_step: float
    running: int
    open_transfers: int
    decode_variant: str = ""
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_sent: int = 0
    stalled_seconds: float = 0.0
    communication_seconds: float | None = None
    step_counts: tuple[int, ...] = ()

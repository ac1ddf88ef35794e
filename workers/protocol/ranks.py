"""Ranks of a ring: settings, rendezvous, model shape, and status. Pure data: no torch.

Ring leaders and ranks exchange these data; orchestration and the services read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ringserve.cp_core.cost.decode import HELIX
from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.transport.peer_tls import PeerTls

STEP_BOUNDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.1, 0.15),
    *(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 60.0),
)
"""Upper bounds of step times, in seconds, for histograms. Decode steps use the first line, prefill steps both."""

COMPILE_POLICIES = ("auto", "off")
"""Policies of compiling the model and recording decode steps: "auto" does both on GPUs."""
NO_QUANTIZATION = "none"
FP8_MLPS = "fp8"
QUANTIZATIONS = (NO_QUANTIZATION, FP8_MLPS)

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
CACHED_KERNELS = 128
"""Number of kernels that torch and oneDNN each keep, one per shape of a matrix product. A layer has about seven shapes
for each number of rows. The default of 1,024 takes a gigabyte after some hundred prompts; making a kernel again takes
about 1 ms."""
WAIT_POLICY = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""Variables that say how OpenMP's threads wait. By default a thread that waits for another spins, which keeps the other
from a core that both need: ranks have more threads than the machine has cores. A thread that sleeps at once must be
woken for each of the 150 parts of a decode step. So a thread spins for some 0.05 ms before it sleeps."""


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a rank's libraries that `environment` lacks; some libraries read them only when loaded.

    If `environment` has one of OpenMP's, the user has decided how threads wait, so none of OpenMP's is returned.
    """
    variables = dict.fromkeys(KERNEL_CACHES, str(CACHED_KERNELS))
    if not WAIT_POLICY.keys() & environment.keys():
        variables |= WAIT_POLICY
    return {name: value for name, value in variables.items() if name not in environment}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSettings:
    """Settings that all ranks of a ring share. A rank's cache has `num_blocks` blocks of `block_tokens` tokens a layer.

    If `kv_memory_fraction` is not 0, it has instead as many as fit in that fraction of the GPU memory that the weights
    leave. `tp` processes share the heads of the same tokens and use the same block table. `listen_host` is the address
    on which ranks listen; empty: the address of the rank's node. `tls` encrypts all traffic between ranks, as far as
    `ring_transport` can, and ranks then accept each other by certificate only. `packs_weights` reorders the weights for
    CPU kernels once the ring is measured; `packs_head` includes the output head, which speeds up decode steps. On
    "cuda" a process has `gpus_per_rank` of a GPU: with less than 1, several share it. `kv_carrier` moves KV to other
    rings: `sockets`, `nixl` by slots of `kv_slot_bytes`, or `auto`, which is NIXL on "cuda" if it is installed, and
    sockets to ranks that it does not reach. With `drafts` decode steps check guesses of the next tokens, from the text
    or by `draft_model`, a directory, which sees the newest `draft_context` tokens. Ranks with the same `cores`, unless
    it is empty, share them: decode steps get at least `least_share` of the time while a prefill rank computes.
    `compile` is one of COMPILE_POLICIES, `quantization` one of QUANTIZATIONS. If `fingerprint` is given, a rank refuses
    to load a model with another one. Two settings are for comparisons only, and ranks with them hand over no KV:
    `replicates_kv` allows more processes than KV heads, and with `scatters_rows` each process has its share of the rows
    between attention and MLP.
    """

    model_path: str
    fingerprint: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    gpus_per_rank: float = 1.0
    attention_backend: str = "auto"
    ring_transport: str = "auto"
    tp: int = 1
    num_blocks: int
    block_tokens: int = 16
    kv_memory_fraction: float = 0.0
    kv_carrier: str = "auto"
    kv_slot_bytes: int = 16 << 20
    num_threads: int = 1
    listen_host: str = "127.0.0.1"
    tls: PeerTls | None = None
    max_batch: int = 32
    cores: str = ""
    least_share: float = 1.0
    drafts: bool = False
    draft_model: str = ""
    draft_context: int = 2048
    decode_variant: str = "auto"
    packs_weights: bool = False
    packs_head: bool = False
    replicates_kv: bool = False
    scatters_rows: bool = False
    compile: str = "off"
    quantization: str = NO_QUANTIZATION

    @property
    def compiles(self) -> bool:
        """True if the ranks compile the model."""
        return self.compile == "auto" and self.device.startswith("cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSpec:
    """Place of one rank in its ring, with the ring's settings.

    `num_ranks` is cp * tp and `rank` is cp_rank * tp + tp_rank. The tp ranks of one cp rank hold the same tokens, each
    its own share of the heads.
    """

    ring: str
    rank: int
    num_ranks: int
    incarnation: str
    settings: RankSettings

    @property
    def tp(self) -> int:
        return self.settings.tp

    @property
    def cp(self) -> int:
        """Number of ranks that share a sequence's tokens: the size of the ring."""
        return self.num_ranks // self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def helix(self) -> int:
        """Number of ranks that share the weights behind attention from the start."""
        return self.cp if self.settings.decode_variant == HELIX else 1

    def with_helix(self) -> RankSpec:
        """Return the same place, in a ring that decodes by helix whatever the settings say."""
        return replace(self, settings=replace(self.settings, decode_variant=HELIX))

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """Shape of a model for the planner and the KV pool. Sizes in elements, or in bytes if the name says so.

    `dtype` and `element_bytes` are for weights and activations. Attention and KV are in `kv_dtype`. `tied_parameters`
    counts the output head if it is the embedding, too. `windows` lists each layer's sliding window in tokens, 0 for
    full attention; it is empty if all layers have full attention. `tail_tokens` is the widest window; steps say which
    rank holds each of that many newest tokens. `has_sinks` tells whether layers have attention sinks.
    """

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
    kv_dtype: str
    kv_element_bytes: int
    eos_token_ids: tuple[int, ...]
    tied_parameters: int = 0
    windows: tuple[int, ...] = ()
    tail_tokens: int = 0
    has_sinks: bool = False

    @property
    def shape(self) -> ModelShape:
        """Sizes in the form that cost models take."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            element_bytes=self.element_bytes,
            kv_element_bytes=self.kv_element_bytes,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Answer of a started rank. `kv_endpoint` is HOST:PORT of its KV receiver, `num_blocks` the size of its cache.

    If `is_helix`, the rank has only a share of the weights, so the ring can decode only by helix.
    """

    rank: int
    kv_endpoint: str
    attention_backend: str
    ring_transport: str
    pid: int
    model: ModelInfo
    num_blocks: int
    is_helix: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEndpoints:
    """Endpoints on which one rank waits for the other ranks of its ring, each HOST:PORT or empty.

    Ranks with other tokens connect to `tokens`, ranks with other heads to `heads`. A transport with a rendezvous in a
    store uses the first rank's `store` instead.
    """

    tokens: str = ""
    heads: str = ""
    store: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSpec:
    """Rendezvous of the ranks of one ring: their endpoints by rank, and the secret that proves membership."""

    name: str
    endpoints: tuple[RankEndpoints, ...]
    secret: str = field(repr=False)
    timeout_seconds: float = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemory:
    """Memory of a rank's GPU in bytes: in total, reserved by the rank's process, and allocated for its tensors."""

    total: int
    reserved: int
    allocated: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """Progress of a rank for watchdogs: a step counter and the seconds since it last moved.

    `decode_variant` served the latest decode step: `gather`, `pass_q` or `helix`, empty before the first.
    `decode_reason` says why the ring shares its weights (helix) or not, if it chose itself. `step_seconds` is the time
    in steps and `wait_seconds` its part spent waiting for peers, except in steps replayed with their messages.
    `communication_seconds` is the part with messages of the ring under way; None: the transport cannot tell.
    `bytes_sent` counts the rank's bytes to its ring. `step_counts` are steps by length, see `StepClock`.
    `stalled_seconds` is the longest time for which a transfer that has begun, and is not complete, received no byte.
    `kv_nixl_bytes` and `kv_socket_bytes` count KV sent to other rings by each carrier; `kv_fallbacks` counts
    connections to ranks that NIXL should serve but does not reach. `gpu` is None on a CPU. `eager_steps` are decode
    steps that replayed no recorded one, by reason, if the model is compiled. `waited_steps` counts a GPU's steps whose
    tokens were read before the next was issued, by reason. `checked_drafts` and `accepted_drafts` count drafts by their
    place behind the newest token; the first rank has them.
    """

    steps: int
    seconds_since_step: float
    running: int
    open_transfers: int
    decode_variant: str = ""
    decode_reason: str = ""
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_sent: int = 0
    stalled_seconds: float = 0.0
    communication_seconds: float | None = None
    step_counts: tuple[int, ...] = ()
    kv_nixl_bytes: int = 0
    kv_socket_bytes: int = 0
    kv_fallbacks: int = 0
    gpu: GpuMemory | None = None
    eager_steps: tuple[tuple[str, int], ...] = ()
    waited_steps: tuple[tuple[str, int], ...] = ()
    checked_drafts: tuple[int, ...] = ()
    accepted_drafts: tuple[int, ...] = ()

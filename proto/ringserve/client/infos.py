"""States of the service and of conversations, typed. Fields have the contract's names and defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Model that a gateway serves."""

    model_path: str = ""
    model_name: str = ""
    model_type: str = ""
    dtype: str = ""
    num_layers: int = 0
    hidden_size: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    vocab_size: int = 0
    max_context_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    kv_bytes_per_token: int = 0
    num_parameters: int = 0
    intermediate_size: int = 0


@dataclass(frozen=True, kw_only=True)
class RankKvUsage:
    """KV blocks of one rank: free, active and retained (`kept_blocks`); their sum is the total."""

    total_blocks: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    kept_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class RingRates:
    """Measured speed of a ring: FLOP/s of a rank, bytes/s of a link, seconds a message, hidden share of both.

    `step_seconds` are those that every step takes in addition. Where ranks are unlike, `speeds` says how many times as
    fast as the slowest each is; where ranks begin a step late, `lateness` has the seconds of each after the first.
    Where ranks share what computes, one is `lone_speed` times as fast while the others wait; 0: not known.
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    link_latency_seconds: float = 0.0
    overlap: float = 0.0
    speeds: tuple[float, ...] = ()
    step_seconds: float = 0.0
    lateness: tuple[float, ...] = ()
    lone_speed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factor of later predictions of such turns: the median of measured over predicted seconds of `num_turns`."""

    algorithm: str = ""
    factor: float = 0.0
    num_turns: int = 0
    min_work: int = 0


@dataclass(frozen=True, kw_only=True)
class RingInfo:
    """State of one ring."""

    role: str = ""
    name: str = ""
    endpoint: str = ""
    incarnation: str = ""
    state: str = ""
    num_ranks: int = 0
    attention_backend: str = ""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_usage: tuple[RankKvUsage, ...] = ()
    rebuilds: int = 0
    rank_pids: tuple[int, ...] = ()
    ring_transport: str = ""
    tp: int = 0
    metrics_endpoint: str = ""
    waiting_work: float = 0.0
    max_waiting_work: float = 0.0
    num_preemptions: int = 0
    decode_variant: str = ""
    decode_reason: str = ""
    rates: RingRates | None = None
    capacity_tokens: int = 0
    chunk_tokens: int = 0
    corrections: tuple[Correction, ...] = ()
    draining: bool = False
    restarting: bool = False
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RingDrain:
    """Progress of a ring that an operator drains."""

    role: str = ""
    ring: str = ""
    has_left: bool = False
    running_turns: int = 0
    moved: int = 0
    left: int = 0
    no_room: int = 0
    failed: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class KvMoves:
    """Retained KV that was moved between rings of a role for one reason."""

    role: str = ""
    reason: str = ""
    moved: int = 0
    failed: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ServerEvent:
    """Event that happened `count` times, the last time `at` seconds since the epoch. `ring` may be empty."""

    at: float = 0.0
    kind: str = ""
    ring: str = ""
    text: str = ""
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class ServerInfo:
    """State of the service, for operators."""

    version: str = ""
    uptime_seconds: float = 0.0
    selector: str = ""
    rings: tuple[RingInfo, ...] = ()
    conversations: int = 0
    running_turns: int = 0
    router_metrics_endpoint: str = ""
    drains: tuple[RingDrain, ...] = ()
    kv_moves: tuple[KvMoves, ...] = ()
    turns_waiting_for_rings: int = 0
    events: tuple[ServerEvent, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Range:
    """Token positions [start, stop)."""

    start: int = 0
    stop: int = 0


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """Tokens whose KV one rank holds."""

    num_tokens: int = 0
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Ring that holds the KV of a conversation's first `num_tokens` tokens."""

    role: str = ""
    ring: str = ""
    incarnation: str = ""
    num_tokens: int = 0
    ranks: tuple[RankShard, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """Share of a partition's keys that reached other ranks, with the first and last ones that always did."""

    keep: float = 0.0
    sinks: int = 0
    window: int = 0


@dataclass(frozen=True, kw_only=True)
class ConversationInfo:
    """State of a conversation and the locations of its KV, which is approximate where there is a `sparsity`.

    `turn_ends` are the numbers of tokens after each of its latest turns.
    """

    conversation_id: str = ""
    num_tokens: int = 0
    num_turns: int = 0
    running_request_id: str = ""
    epoch: int = 0
    placements: tuple[Placement, ...] = ()
    idle_seconds: float = 0.0
    ttl_seconds: float = 0.0
    num_waiting: int = 0
    sparsity: Sparsity | None = None
    turn_ends: tuple[int, ...] = ()
    last_token: int | None = None


@dataclass(frozen=True, kw_only=True)
class ForkInfo:
    """Conversation that a fork has begun, and the rings that keep KV of it, shared with its source."""

    conversation_id: str = ""
    num_tokens: int = 0
    num_turns: int = 0
    ttl_seconds: float = 0.0
    placements: tuple[Placement, ...] = ()
    sparsity: Sparsity | None = None


@dataclass(frozen=True, kw_only=True)
class ConversationSummary:
    """Conversation of a list, with the tokens whose KV rings retain."""

    conversation_id: str = ""
    num_tokens: int = 0
    num_turns: int = 0
    running_request_id: str = ""
    idle_seconds: float = 0.0
    ttl_seconds: float = 0.0
    num_waiting: int = 0
    kept_on_prefill: int = 0
    kept_on_decode: int = 0


@dataclass(frozen=True, kw_only=True)
class Aborted:
    """Requests that an Abort has ended, and those that no ring knows."""

    aborted: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

"""Views of rings, conversations and the whole service. Frozen data with the contract's field names and defaults.

Leaders and the router fill them in, the gateway sends them, metrics, commands and clients read them. The module imports
nothing but the standard library, so that every layer can use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKvUsage:
    """KV blocks of one rank: free, active and retained between turns (`kept_blocks`); their sum is the total."""

    total_blocks: int = 0
    free_blocks: int = 0
    active_blocks: int = 0
    kept_blocks: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRates:
    """Measured rates of a ring: FLOP/s of a rank, bytes/s in each direction of a link, seconds of latency per message.

    `overlap` is the share of communication that is hidden behind attention, 0 to 1. `step_seconds` are added to a step
    of any length. All rates are 0 before the first measurement. If ranks are unlike, the rates are those of the
    slowest, and `speeds` says how many times as fast each rank is; empty if all are alike. `lateness` has the seconds
    by which each rank begins a step later than the earliest rank; empty if none is late. `step_seconds` include the
    greatest lateness, since all ranks of a ring wait for it. All rates are those of ranks that compute together: if
    they share cores, a GPU or its memory, one rank computes `lone_speed` times as fast while the others wait (0: not
    known).
    """

    gemm_flops: float = 0.0
    attention_flops: float = 0.0
    link_bytes_per_second: float = 0.0
    link_latency_seconds: float = 0.0
    overlap: float = 1.0
    speeds: tuple[float, ...] = ()
    step_seconds: float = 0.0
    lateness: tuple[float, ...] = ()
    lone_speed: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factor that the router applies to predictions for a ring: median of measured over predicted seconds.

    It is learned from `num_turns` turns. It applies to turns that `algorithm` computes, of at least `min_work` and less
    than 4 * `min_work` work units.
    """

    algorithm: str = ""
    min_work: int = 0
    factor: float = 0.0
    num_turns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingInfo:
    """Status of a ring.

    `rank_pids` has `tp` processes a rank, in rank order. `decode_variant` is the variant of the latest decode step that
    the ring's watch saw, and `decode_reason` why the ring chose helix or not. `failure` is why the latest attempt to
    rebuild the ring failed. `waiting_work` and `max_waiting_work` are in work units; only prefill rings have them.
    `nodes` are the addresses of the nodes of its ranks, each once.

    The router adds what the ring announced (`rates`, `capacity_tokens`, `chunk_tokens`), its own `corrections`, and
    whether it expects the ring back after a drain (`restarting`). A ring that has left has the state "away".
    """

    role: str = ""
    name: str = ""
    endpoint: str = ""
    incarnation: str = ""
    state: str = ""
    num_ranks: int = 0
    attention_backend: str = ""
    ring_transport: str = ""
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_usage: tuple[RankKvUsage, ...] = ()
    rebuilds: int = 0
    rank_pids: tuple[int, ...] = ()
    tp: int = 1
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
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingDrain:
    """Progress of a ring that drains: what became of the conversations whose KV it retains.

    `left` are still to be moved, `no_room` found no room on another ring, and `failed` moves failed. `has_left` says
    that the ring has left the service.
    """

    role: str = ""
    ring: str = ""
    has_left: bool = False
    running_turns: int = 0
    moved: int = 0
    left: int = 0
    no_room: int = 0
    failed: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class KvMoves:
    """Moves of retained KV from rings of a role for one reason, since the router started."""

    role: str = ""
    reason: str = ""
    moved: int = 0
    failed: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEvent:
    """Event that happened `count` times, the last time `at` seconds since the epoch. `ring` may be empty."""

    at: float = 0.0
    kind: str = ""
    ring: str = ""
    text: str = ""
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """State of the service, for operators. The gateway adds its `version` and `uptime_seconds`.

    `events` are the latest since the router started, the newest last.
    """

    selector: str = ""
    rings: tuple[RingInfo, ...] = ()
    conversations: int = 0
    running_turns: int = 0
    version: str = ""
    uptime_seconds: float = 0.0
    turns_waiting_for_rings: int = 0
    router_metrics_endpoint: str = ""
    drains: tuple[RingDrain, ...] = ()
    kv_moves: tuple[KvMoves, ...] = ()
    events: tuple[ServerEvent, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Token positions [start, stop)."""

    start: int = 0
    stop: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """Tokens whose KV one rank holds, in stored order."""

    num_tokens: int = 0
    ranges: tuple[Range, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """KV of a conversation's first `num_tokens` tokens on one ring, there since the conversation's `epoch`."""

    role: str = ""
    ring: str = ""
    incarnation: str = ""
    num_tokens: int = 0
    ranks: tuple[RankShard, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sparsity:
    """Share of a partition's keys that reach other ranks; the first `sinks` and the last `window` always do."""

    keep: float = 0.0
    sinks: int = 4
    window: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationInfo:
    """State of a conversation and the locations of its KV. `epoch` counts the changes of `placements`.

    `ttl_seconds` 0 means that the conversation does not expire by age. Its KV was computed with `sparsity`; None: it is
    exact. `turn_ends` are the numbers of tokens after each of its latest turns, as far as they are known. `last_token`
    is set only in answers about a single conversation.
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

    def retained_on(self, role: str) -> int:
        """Return the most tokens that a ring of this role retains."""
        return max((place.num_tokens for place in self.placements if place.role == role), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSummary:
    """Conversation in a list: as `ConversationInfo`, with the number of retained tokens instead of their locations."""

    conversation_id: str = ""
    num_tokens: int = 0
    num_turns: int = 0
    running_request_id: str = ""
    idle_seconds: float = 0.0
    ttl_seconds: float = 0.0
    num_waiting: int = 0
    kept_on_prefill: int = 0
    kept_on_decode: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationPage:
    """Page of conversations in id order. The next page begins at `next_page_token`; empty on the last page."""

    conversations: tuple[ConversationSummary, ...] = ()
    next_page_token: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Aborted:
    """Requests that an Abort has ended, and those that no ring knows."""

    aborted: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

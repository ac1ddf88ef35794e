"""Views of rings, conversations and the whole service for operators and clients, and their health.

Frozen data. Leaders and the router fill them in; the gateway, metrics and commands show them. Health endpoints ask
`ring_fault` and `service_fault`, which look at progress: a living process that makes no steps is a fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ringserve.cp_core.cost.model import RingRates
from ringserve.cp_core.layout.shards import ShardMap
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.protocol.rings import RingState
from ringserve.workers.protocol.prefill_steps import Algorithm
from ringserve.workers.protocol.ranks import RankStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKvUsage:
    """KV blocks of one rank: free, active and retained between turns (`kept_blocks`); their sum is the total."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    kept_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factor that the router applies to predictions for a ring, learnt from `num_turns` measured turns.

    It holds for turns by `algorithm` with at least `min_work` and less than four times as many work units.
    """

    algorithm: Algorithm
    min_work: int
    factor: float
    num_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStatus:
    """Status that a ring reports to operators.

    `rank_pids` has `tp` processes a rank, in order of ranks. `decode_variant` is the variant of the latest decode step
    that the ring's watch saw, and `decode_reason` why the ring chose helix or not. `waiting_work` and
    `max_waiting_work` are in work units; prefill rings alone have them. `nodes` are the addresses of the nodes of its
    ranks, each once.

    The router adds what the ring announced (`rates`, `capacity_tokens`, `chunk_tokens`), its own `corrections`, and
    whether it expects the ring back after a drain (`is_restarting`). A ring that has left has the state "away".
    """

    role: str
    name: str
    endpoint: str
    incarnation: str
    state: str
    num_ranks: int
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
    is_draining: bool = False
    is_restarting: bool = False
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class KvLocationView:
    """Location of the KV of tokens [0, num_tokens) of a conversation on one ring, since `epoch`."""

    role: str
    ring: str
    incarnation: str
    num_tokens: int
    shards: ShardMap
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationView:
    """Conversation as `GetConversation` shows it. `epoch` counts the changes of `placements`.

    `ttl_seconds` 0 means that the conversation does not expire by age. Its KV was computed with `sparsity`; None: it is
    exact. `turn_ends` are the numbers of tokens after each of its latest turns, as far as they are known. `last_token`
    is told of one conversation, not in lists.
    """

    conversation_id: str
    num_tokens: int
    num_turns: int
    running_request_id: str
    epoch: int
    placements: tuple[KvLocationView, ...]
    idle_seconds: float = 0.0
    ttl_seconds: float = 0.0
    num_waiting: int = 0
    sparsity: Sparsity | None = None
    turn_ends: tuple[int, ...] = ()
    last_token: int | None = None

    def retained_on(self, role: str) -> int:
        """Return how many tokens a ring of that role retains."""
        return max((place.num_tokens for place in self.placements if place.role == role), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSummary:
    """Conversation in a list: as `ConversationView`, with token counts in place of locations."""

    conversation_id: str
    num_tokens: int
    num_turns: int
    running_request_id: str
    idle_seconds: float
    ttl_seconds: float
    num_waiting: int
    kept_on_prefill: int
    kept_on_decode: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationList:
    """Page of conversations in order of id. The next page begins after `next_after`; empty on the last page."""

    conversations: tuple[ConversationSummary, ...]
    next_after: str


class MoveReason(StrEnum):
    """Reasons why retained KV moves between rings.

    TURN: a turn pulls KV from a ring that its conversation leaves. DRAIN: the ring drains. FULL: the ring is about to
    evict.
    """

    TURN = "turn"
    DRAIN = "drain"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveTotals:
    """Moves of retained KV from rings of a role for one reason, since the router started."""

    role: str
    reason: MoveReason
    num_moved: int
    num_failed: int
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainView:
    """Progress of a ring that drains: what became of the conversations whose KV it retains.

    `num_left` are still to be moved, `num_no_room` found no room on another ring, and `num_failed` moves failed.
    """

    role: str
    ring: str
    has_left: bool
    running_turns: int
    num_moved: int
    num_left: int
    num_no_room: int
    num_failed: int
    moved_bytes: int


class EventKind(StrEnum):
    """Kinds of events. RING: a ring came, drains, left or returned. LOST: it lost a rank, its leader or its place.

    REBUILT: it serves again after that. FAILOVER: a turn lost a ring or its gateway and went on. REFUSAL: a turn got no
    rings. EVICTION: a ring made room by dropping retained KV.
    """

    RING = "ring"
    LOST = "lost"
    REBUILT = "rebuilt"
    FAILOVER = "failover"
    REFUSAL = "refusal"
    EVICTION = "eviction"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEvent:
    """Event that happened `count` times, the last time `at` seconds since the epoch. `ring` may be empty."""

    at: float
    kind: EventKind
    ring: str
    text: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerView:
    """Whole service as the router sees it. `metrics_endpoint` is the router's.

    `events` are the latest since the router started, the newest last.
    """

    selector: str
    rings: tuple[RingStatus, ...]
    conversations: int
    running_turns: int
    turns_waiting_for_rings: int = 0
    metrics_endpoint: str = ""
    drains: tuple[DrainView, ...] = ()
    moves: tuple[MoveTotals, ...] = ()
    events: tuple[ServerEvent, ...] = ()


def ring_fault(status: RingStatus, ranks: Iterable[RankStatus], stuck_seconds: float) -> str:
    """Return one sentence on why a ring should get no turns; empty where it serves.

    A rank is stuck if it has work and made no step for `stuck_seconds`. A transfer is stuck if it began and got no byte
    for as long.
    """
    if status.state != RingState.READY:
        return f"ring {status.name} is {status.state}"
    if status.is_draining:
        return f"ring {status.name} drains"
    for rank in ranks:
        if rank.running and rank.seconds_since_step > stuck_seconds:
            return f"a rank of ring {status.name} made no step for {rank.seconds_since_step:.0f} s"
        if rank.stalled_seconds > stuck_seconds:
            return f"a transfer to ring {status.name} got no byte for {rank.stalled_seconds:.0f} s"
    return ""


def service_fault(view: ServerView) -> str:
    """Return one sentence on why the service should get no turns; empty where it serves.

    It serves if each role has a ring that takes turns, or one that is to return: turns wait for that ring.
    """
    return roles_fault(view.rings)


def roles_fault(rings: Iterable[RingStatus]) -> str:
    """Return one sentence on the role that lacks rings; empty where none does."""
    serving_roles = {
        ring.role for ring in rings if ring.is_restarting or (ring.state == RingState.READY and not ring.is_draining)
    }
    return next((f"no {role} ring takes turns" for role in ("prefill", "decode") if role not in serving_roles), "")

"""Views of rings, conversations and the whole service for operators and clients, and faults that stop it from serving.

Frozen data. A fault is about progress, not merely about whether processes live.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from cp_core.cost.model import RingRates
from cp_core.layout.shards import ShardMap
from orchestration.protocol.rings import RingState
from workers.protocol.prefill_steps import Algorithm
from workers.protocol.ranks import RankStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKvUsage:
    """KV blocks of one rank: free, active and retained between turns (`kept_blocks`); their sum is the total."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    kept_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factor of the predictions for a ring's turns by `algorithm`, of `min_work` to four times as many work units.

    `num_turns` is how many such turns were measured.
    """

    algorithm: Algorithm
    min_work: int
    factor: float
    num_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStatus:
    """Status that a ring reports to operators.

    `rank_pids` are those of `tp` processes a rank, in order. `decode_variant` served the latest decode step that was
    looked at. `waiting_work` and its bound are in work units, of prefill rings. `nodes` are the addresses of the nodes
    that its ranks are on, each once.

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
    """Conversation as `GetConversation` shows it. `epoch` counts the changes of its placements.

    `ttl_seconds` 0: it is never forgotten for its age.
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

    def retained_on(self, role: str) -> int:
        """Return how many tokens a ring of that role retains."""
        return max((place.num_tokens for place in self.placements if place.role == role), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSummary:
    """Conversation in a list: as `ConversationView`, without where each token lies."""

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
    """Page of conversations, by id. The next one begins after `next_after`; empty where there is none."""

    conversations: tuple[ConversationSummary, ...]
    next_after: str


class MoveReason(StrEnum):
    """Reasons why retained KV moves between rings.

    A turn pulls what its conversation leaves behind, its ring drains, or its ring is about to evict.
    """

    TURN = "turn"
    DRAIN = "drain"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveTotals:
    """Moves of retained KV from rings of a role, since the router started."""

    role: str
    reason: MoveReason
    num_moved: int
    num_failed: int
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainView:
    """Progress of a ring that leaves.

    Of its conversations `num_left` are still to be moved, `num_no_room` found no room elsewhere, and `num_failed` moves
    failed.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerView:
    """Whole service as the router sees it. `metrics_endpoint` is the router's."""

    selector: str
    rings: tuple[RingStatus, ...]
    conversations: int
    running_turns: int
    turns_waiting_for_rings: int = 0
    metrics_endpoint: str = ""
    drains: tuple[DrainView, ...] = ()
    moves: tuple[MoveTotals, ...] = ()


def ring_fault(status: RingStatus, ranks: Iterable[RankStatus], stuck_seconds: float) -> str:
    """Return one sentence on why a ring should get no turns; empty where it serves.

    A rank that works and made no step for `stuck_seconds` is stuck, whatever its process says. So is a transfer that
    began and got no byte for so long.
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
    """Return one sentence on why no turn could be served.

    It is empty where a ring of each role takes turns, or is to return: turns wait for it.
    """
    taking = {
        ring.role
        for ring in view.rings
        if ring.is_restarting or (ring.state == RingState.READY and not ring.is_draining)
    }
    return next((f"no {role} ring takes turns" for role in ("prefill", "decode") if role not in taking), "")

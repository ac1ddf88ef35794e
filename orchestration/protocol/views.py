"""What operators and clients are shown of rings, of conversations and of the whole service. Frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cp_core.cost.model import RingRates
from cp_core.layout.shards import ShardMap
from workers.protocol.prefill_steps import Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class RankKvUsage:
    """KV blocks of one rank; free + active + kept = total."""

    total_blocks: int
    free_blocks: int
    active_blocks: int
    kept_blocks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What predictions of a ring's turns by `algorithm` are multiplied by, of `min_work` to four times as many work
    units, and how many such turns it has had.
    """

    algorithm: Algorithm
    min_work: int
    factor: float
    num_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RingStatus:
    """What a ring tells operators. `rank_pids` are those of `tp` processes a rank, in order; `decode_variant` served
    the latest decode step that was looked at. `waiting_work` and its bound are in work units, of prefill rings.

    `nodes` are the addresses of the nodes that its ranks are on, each once.

    The router adds what the ring announced (`rates`, `capacity_tokens`, `chunk_tokens`), its own `corrections`, and
    whether it expects the ring back (`is_restarting`) when that has drained; one that has left is "away" by its state.
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
    """Tokens [0, num_tokens) of a conversation on one ring, there since `epoch`."""

    role: str
    ring: str
    incarnation: str
    num_tokens: int
    shards: ShardMap
    epoch: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationView:
    """A conversation as `GetConversation` shows it. `epoch` counts the changes of its placements. `ttl_seconds` 0: it
    is never forgotten for its age.
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
        """Tokens whose KV a ring of that role keeps."""
        return max((place.num_tokens for place in self.placements if place.role == role), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationSummary:
    """A conversation in a list: as `ConversationView`, without where each token lies."""

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
    """One page, by id. The next one begins after `next_after`; empty where there is none."""

    conversations: tuple[ConversationSummary, ...]
    next_after: str


class MoveReason(StrEnum):
    """Why kept KV goes from one ring to another: a turn fetches what its conversation leaves behind, its ring drains,
    or its ring is about to evict.
    """

    TURN = "turn"
    DRAIN = "drain"
    FULL = "full"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoveTotals:
    """Moves of kept KV from rings of a role, since the router started."""

    role: str
    reason: MoveReason
    num_moved: int
    num_failed: int
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainView:
    """How far a ring is with leaving. Of its conversations `num_left` are still to be moved, `num_no_room` found no
    room elsewhere, and `num_failed` moves failed.
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
    """The whole service as the router sees it. `metrics_endpoint` is the router's."""

    selector: str
    rings: tuple[RingStatus, ...]
    conversations: int
    running_turns: int
    turns_waiting_for_rings: int = 0
    metrics_endpoint: str = ""
    drains: tuple[DrainView, ...] = ()
    moves: tuple[MoveTotals, ...] = ()

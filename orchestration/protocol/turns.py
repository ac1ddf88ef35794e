"""What the router, the ring leaders and the gateway say to each other about one turn. Frozen data, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cp_core.cost.model import RingRates
from cp_core.layout.shards import ShardMap, TokenRange
from workers.protocol.decode_commands import FinishReason
from workers.protocol.prefill_steps import Algorithm, TokenIds
from workers.sampling.parameters import SamplingParameters, TokenLogprobs

MAX_PRIORITY = 100
"""Of a turn, and its negative the least."""


class PromptMode(StrEnum):
    """How a prompt relates to its conversation's earlier tokens; NEW where there are none."""

    AUTO = "auto"
    NEW = "new"
    APPEND = "append"
    WHOLE_HISTORY = "whole_history"


@dataclass(frozen=True, kw_only=True, slots=True)
class KvQuota:
    """All that a tenant's conversations and running turns may hold: ids of both are `tenant/...`."""

    tenant: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A turn as the gateway hands it in. `conversation_id` empty: nothing is kept after the turn. A higher `priority`
    goes first.

    The conversation is forgotten when nobody has used it for `conversation_ttl_seconds` (0: never; None: as before, or
    as the router is set). `wait`: behind the conversation's running turn, instead of being refused. An `algorithm`
    takes the place of the planner's choice. `trace_parent` is what its traces continue; empty: there are none.
    `kv_quota` bounds what its tenant holds; None: nothing does.
    """

    request_id: str
    conversation_id: str
    prompt_mode: PromptMode
    token_ids: TokenIds
    sampling: SamplingParameters
    deadline_seconds: float
    conversation_ttl_seconds: float | None = None
    wait: bool = False
    priority: int = 0
    algorithm: Algorithm | None = None
    trace_parent: str = ""
    kv_quota: KvQuota | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSource:
    """Where cached tokens come from: "kept_on_prefill", "pulled_from_decode", or "pulled_from_other", a ring that the
    conversation leaves: `ring`; or "kept_on_decode", where that ring computes the prompt itself.
    """

    source: str
    tokens: TokenRange
    ring: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedChunk:
    """New tokens that are computed in one step, after all before them. `num_turns` shared the step; 0 if planned."""

    tokens: TokenRange
    algorithm: Algorithm
    num_turns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RingAlternative:
    """What a turn is predicted to take on one ring of `num_ranks` ranks of `tp` processes, in seconds: behind what
    waits there, to fetch cached KV that the ring lacks, and to compute the rest.

    Where the decode ring could compute the prompt itself it is one of those compared: with `handoff_seconds`, of the
    new tokens' KV on its way from a prefill ring, and `stall_seconds`, by which all turns that decode there would
    wait longer together.
    """

    ring: str
    num_ranks: int
    tp: int
    queue_seconds: float
    move_seconds: float
    prefill_seconds: float
    handoff_seconds: float = 0.0
    stall_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        waits = self.queue_seconds + self.move_seconds + self.handoff_seconds + self.stall_seconds
        return waits + self.prefill_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """How a turn is computed and why. `algorithm` is that of most new tokens, and `reason` tells of those chunks.

    `alternatives` are (algorithm, predicted seconds) of computing every chunk by it; where only the decode ring keeps
    a part, also those of a "pull" and of a "recompute", each until the prefill has ended. `chunks` are those of a ring
    that has nothing else to do: the prefill leader cuts by what waits, and reports what it did. `ring_alternatives` are
    the rings that were compared, the quickest few and the chosen one; none where there was no choice.

    With `Algorithm.DECODE_RING` the decode ring is also `prefill_ring`, and nothing is handed over. Other plans have it
    among their `alternatives` where it was possible.
    """

    algorithm: Algorithm
    reason: str
    new_tokens: int
    cached_tokens: int
    prefill_ring: str
    decode_ring: str
    prefill_ranks: int
    decode_ranks: int
    cached_sources: tuple[CachedSource, ...]
    chunks: tuple[PlannedChunk, ...]
    predicted_prefill_seconds: float
    alternatives: tuple[tuple[str, float], ...]
    prompt_mode: PromptMode
    ring_alternatives: tuple[RingAlternative, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunTurn:
    """A planned turn under way: its tokens come from the decode leader at `decode_endpoint`."""

    turn_id: str
    decode_endpoint: str
    prompt_tokens: int
    plan: TurnPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Pin a sequence for a turn. `sampling` and `source_incarnation` matter to the decode ring only.

    So do `penalized_ids`, the prompt's distinct tokens where a penalty looks at them, and `is_direct`: the decode ring
    itself is going to compute what it does not keep, so no KV comes. `request_id` is for logs, `trace_parent` for
    traces.
    """

    turn_id: str
    attempt: int
    kv_id: str
    match_tokens: int
    num_tokens: int
    deadline_seconds: float
    source_incarnation: str
    sampling: SamplingParameters
    penalized_ids: tuple[int, ...] = ()
    priority: int = 0
    request_id: str = ""
    trace_parent: str = ""
    is_direct: bool = False

    @property
    def log_fields(self) -> dict[str, str]:
        """`extra` of a log line about this turn."""
        return {"request_id": self.request_id, "turn_id": self.turn_id}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """What a ring set aside. `shards` lays tokens [retained_tokens, num_tokens) over its ranks (decode rings only).

    `kv_endpoints` are those of `tp` processes a rank, in order.
    """

    incarnation: str
    retained_tokens: int
    shards: ShardMap
    kv_endpoints: tuple[str, ...]
    tp: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainingRing:
    """A ring that keeps KV of a turn's conversation, and is none of the turn's own."""

    role: str
    ring: str
    endpoint: str
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTurn:
    """Run the prefill of a reserved turn; `destination` is the decode ring's reservation, also where it runs there.

    Cached tokens that the ring lacks are pulled from there, or `pulled_from` another ring: what that cannot send is
    computed after all.
    `chunks` cover tokens [cached_tokens, len(token_ids)) in order. They are advice: the leader cuts by what else waits,
    and takes from them which algorithm to prefer where.
    """

    turn_id: str
    attempt: int
    kv_id: str
    token_ids: TokenIds
    cached_tokens: int
    chunks: tuple[PlannedChunk, ...]
    sampling: SamplingParameters
    deadline_seconds: float
    decode_endpoint: str
    destination: Reservation
    pulled_from: RetainingRing | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillReport:
    """What the ring that computed the prompt measured, and the chunks as it computed them; `lost_tokens` of them were
    to be pulled.

    `prefill_seconds` are those of the steps the turn was in, shared ones whole; `queue_seconds` the rest of the time
    from its reservation to its first token.
    """

    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    chunks: tuple[PlannedChunk, ...] = ()
    lost_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillDone:
    """The turn's KV is where it is decoded; `shards` is how the whole prompt now lies on the ring that computed it."""

    report: PrefillReport
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """The first token exists; decoding may begin once the KV is sealed.

    Where asked for, `logprobs` are the first token's, `prompt_logprobs` those of the prompt's from the second on.
    """

    turn_id: str
    attempt: int
    first_token: int
    report: PrefillReport
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeTurn:
    """From the decode leader: a turn whose KV it dropped has room again, for the prompt and these decoded tokens.

    `attempt` counts from 1, the turn's first prefill. The answer is waited for until the turn's deadline.
    """

    turn_id: str
    attempt: int
    token_ids: tuple[int, ...]
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensEvent:
    """Newly decoded tokens of a turn; `logprobs` has one for each token, or none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredEvent:
    """How likely the prompt's tokens from the second on were."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndingEvent:
    """No token follows; the turn waits to be told by `finish_turn` how many of them make the answer."""

    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEvent:
    """The turn is over and its KV settled."""

    finish_reason: FinishReason
    migrated_bytes: int
    migration_seconds: float
    handoff_seconds: float


TurnEvent = PrefillReport | ScoredEvent | TokensEvent | EndingEvent | FinishedEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOutcome:
    """What the decode leader tells the router when a turn is over. `kv_tokens` and `shards` are its ring's."""

    turn_id: str
    ok: bool
    token_ids: tuple[int, ...] = ()
    kv_tokens: int = 0
    shards: ShardMap = field(default_factory=lambda: ShardMap(()))


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRegistration:
    """A ring that is ready to serve. `capacity_tokens` is the KV room of the whole ring.

    `num_ranks` ranks share the tokens, and each is `tp` processes that share the heads. `chunk_tokens` is the most that
    one of its prefill steps may compute, `step_budget` its most work units (0: those of `chunk_tokens` tokens). One
    that `is_draining` takes no new turns, one that `is_leaving` is gone when this is read.

    A decode ring computes up to `max_direct_tokens` tokens of a prompt itself (0: none), where a step of them is
    predicted to take no longer than `max_direct_seconds`.

    What changes from one announcement to the next: work units that wait and those it computes a second, of
    prefill rings (0: not known); tokens that no running turn holds the room of (None: not known), and those of them
    that nothing is kept in and more may be kept in; and the turns that a decode ring takes into one batch (0: not
    known).
    """

    role: str
    name: str
    endpoint: str
    incarnation: str
    num_ranks: int
    rates: RingRates
    capacity_tokens: int
    chunk_tokens: int
    tp: int = 1
    step_budget: float = 0.0
    min_chunk_tokens: int = 1
    waiting_work: float = 0.0
    work_rate: float = 0.0
    free_tokens: int | None = None
    spare_tokens: int = 0
    max_batch: int = 0
    max_direct_tokens: int = 0
    max_direct_seconds: float = 0.0
    is_draining: bool = False
    is_leaving: bool = False

    @property
    def doing(self) -> str:
        """For logs."""
        return "has left" if self.is_leaving else "drains" if self.is_draining else "serves"

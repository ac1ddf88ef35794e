"""Messages between the router, the ring leaders and the gateway about a turn and its retained KV.

Frozen data, no behaviour.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.protocol.plans import Bound, PlannedChunk, PromptMode, TurnPlan
from ringserve.views import RingRates
from ringserve.workers.protocol.steps import NO_TEXT, Algorithm, FinishReason, TokenIds
from ringserve.workers.protocol.transfers import TransferKey
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs

FREE_SHARES = 3.0
"""A tenant may hold this many times the units that stay free: one that asks without end fills 3/4, two fill 6/7."""
MAX_PRIORITY = 100  # of a turn; its negative is the lowest
Attributes = Mapping[str, str | int | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class KvQuota:
    """Limit of the KV of a tenant's conversations and running turns: ids of both are `tenant/...`."""

    tenant: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LostTurn:
    """Turn whose ring or stream was lost, as its gateway knows it.

    The answer goes on after `token_ids`, the tokens that its client has; if `is_complete`, they are the whole answer.
    `prompt_tokens` is the length of the whole prompt as it was planned. `turn_id` is empty if another gateway, which is
    gone, began the turn, or if the router was lost before it answered: then a turn that still runs goes on as it is.
    Without `turn_id` and `prompt_tokens` the turn may not have begun.
    """

    turn_id: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    is_complete: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """Turn as the gateway hands it in. A higher `priority` goes first.

    `no_cache`: the turn uses no KV of other histories, and without a conversation its own KV is not retained. If
    `expected_tokens` is given, the conversation must have exactly as many tokens. The conversation is forgotten when it
    has not been used for `conversation_ttl_seconds` (0: never; None: as before, or as the router is set). `wait`: if
    the conversation has a running turn, this turn waits for its end instead of being refused. An `algorithm` replaces
    the planner's choice. `trace_parent` is the trace that the turn continues, if any. `kv_quota` bounds the tenant's
    KV; None: there is no bound. `follows` names a request with the same prompt, whose KV the turn waits for, to share
    it. `resume`: the turn has begun before, and lost a ring, its stream or its gateway. `reader` names the gateway's
    stream that reads the turn; an abort by an earlier reader is ignored. Turns of one `cache_key` prefer the rings of
    the latest one, if they answer about as soon as others. With a `bound` the turn may be sparse; None: the router's
    setting holds. If `is_open_ended`, the router limits the answer to the room that there is. The first `num_special`
    tokens were put before a text by the tokenizer, and are left out if it continues a conversation. `prediction` is
    text that the client expects in the answer: tokens are drafted from it too.
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
    no_cache: bool = False
    expected_tokens: int | None = None
    follows: str = ""
    cache_key: str = ""
    resume: LostTurn | None = None
    reader: str = ""
    bound: Bound | None = None
    is_open_ended: bool = False
    num_special: int = 0
    prediction: TokenIds = field(default_factory=lambda: NO_TEXT, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedAnswer:
    """Answer of a turn that ended well: all its tokens. `seed` tells its request from others of the same id."""

    token_ids: tuple[int, ...]
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunTurn:
    """Planned turn in progress: its tokens come from the decode leader at `decode_endpoint`.

    If the turn was begun again, `lost_role` is the role of the ring that it had lost. `ended` is set if it had ended
    well by then. The answer has at most `max_tokens` (0: not known any more).
    """

    turn_id: str
    decode_endpoint: str
    prompt_tokens: int
    plan: TurnPlan
    remembered_tokens: int = 0
    lost_role: str = ""
    ended: EndedAnswer | None = None
    max_tokens: int = 0


def exceeds_share(mine: float, asked: float, total: float, limit: float) -> bool:
    """Return whether one who has `mine` of the `total` may not add `asked`, since others need room.

    The rule holds for the work and KV of tenants, and for the connections of addresses. One who has nothing yet is
    always within the share.
    Source: dynamic queue thresholds (Choudhury, Hahne 1998).
    Example: one tenant has all 70 units that are taken in a queue of 100. 10 more exceed its share, 10 of another do
    not.
    """
    return mine > 0 and mine + asked > FREE_SHARES * (limit - total - asked)


def tenant_of(scoped_id: str) -> str:
    """Return the tenant of an id of the form `tenant/...`; empty if ids carry no tenant."""
    tenant, slash, _ = scoped_id.partition("/")
    return tenant if slash else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserve:
    """Request to pin a turn's KV. `request_id` is for logs, `trace_parent` for traces.

    Only the decode ring uses `source_incarnation`, `sampling`, `penalized_ids`, `draft_text`, `is_direct`, and the
    tokens of `answer`. `penalized_ids` are the prompt's distinct tokens if a penalty needs them. `draft_text` has the
    newest tokens of the client's prediction and the `num_tokens`: next tokens may be drafted from it. `is_direct`: the
    decode ring computes the tokens that it does not retain. It begins at once, and no KV comes. `shares` names another
    sequence: the turn's sequence is new, begins with that one's KV and shares its blocks. `is_spare`: once retained,
    its KV is evicted before others', as a ring of the other role retains it too. `answer` has the tokens that the
    client has already: the answer goes on after them. All but the newest of them are among the `num_tokens`.
    `waited_seconds` is the time since the router took the turn, which is its age in a prefill ring's order: a turn that
    lost a ring does not queue behind later turns.
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
    draft_text: TokenIds = field(default_factory=lambda: NO_TEXT, compare=False, repr=False)
    priority: int = 0
    request_id: str = ""
    trace_parent: str = ""
    is_direct: bool = False
    shares: str = ""
    is_spare: bool = False
    answer: tuple[int, ...] = ()
    waited_seconds: float = 0.0

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields for the `extra` of a log line about this turn."""
        return {"request_id": self.request_id, "turn_id": self.turn_id}

    @property
    def tenant(self) -> str:
        """Tenant of the turn; empty if the service has none."""
        return tenant_of(self.request_id)

    @property
    def has_begun(self) -> bool:
        """True if the turn has been on a decode ring before, which was lost or preempted it."""
        return self.attempt > 1 or bool(self.answer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Room that a ring reserved. `kv_endpoints` has one endpoint per process, in order; a rank has `tp` processes.

    A decode ring's `shards` are the places of tokens [retained_tokens, num_tokens), a prefill ring's the places of the
    retained tokens.
    """

    incarnation: str
    retained_tokens: int
    shards: ShardMap
    kv_endpoints: tuple[str, ...]
    tp: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainingRing:
    """Ring other than the turn's own ones that retains KV of its prompt, under `kv_id`."""

    role: str
    ring: str
    endpoint: str
    incarnation: str
    kv_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTurn:
    """Request to prefill a reserved turn.

    `destination` is the decode ring's reservation, also if that ring computes the prompt. Cached tokens that the ring
    lacks are pulled from `pulled_from`, or from the decode ring if that is None. Tokens that cannot be pulled from
    `pulled_from` are computed; if they cannot be pulled from the decode ring, the turn fails. `chunks` cover tokens
    [cached_tokens, len(token_ids)) in order. They are advice: the leader cuts anew by the other turns that wait, and
    takes only the preferred algorithms from them. A turn with a `sparsity` is computed by pass-KV, and its KV is
    approximate.
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
    sparsity: Sparsity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillReport:
    """Measurements of the ring that computed the prompt, and the chunks as it computed them.

    `prefill_seconds` adds up the steps that the turn was in; a step shared with other turns counts whole.
    `queue_seconds` is the rest of the time from its reservation to its first token. `lost_tokens` counts the tokens
    that could not be pulled and were computed.
    """

    prefill_seconds: float = 0.0
    queue_seconds: float = 0.0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    chunks: tuple[PlannedChunk, ...] = ()
    lost_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillDone:
    """Result of a prefill: the KV is on the decode ring. `shards` are its places on the ring that computed it."""

    report: PrefillReport
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """Request to decode once the KV is sealed, with the first token and the `logprobs` that were asked for."""

    turn_id: str
    attempt: int
    first_token: int
    report: PrefillReport
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeTurn:
    """Request of a decode leader to make a preempted turn's KV again, for the prompt and these decoded tokens.

    `attempt` 1 is the turn's first prefill. The decode leader waits for the answer until the turn's deadline.
    """

    turn_id: str
    attempt: int
    token_ids: tuple[int, ...]
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensEvent:
    """Newly decoded tokens of a turn; `logprobs` has one entry for each token, or none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredEvent:
    """Log-probabilities of the prompt's tokens from the second on."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndingEvent:
    """End of the tokens; the turn waits until `finish_turn` says how many of them make the answer."""

    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedEvent:
    """End of the turn, with its KV settled. `accepted_drafts` counts its tokens that were drafted and accepted."""

    finish_reason: FinishReason
    migrated_bytes: int
    migration_seconds: float
    handoff_seconds: float
    accepted_drafts: int = 0


TurnEvent = PrefillReport | ScoredEvent | TokensEvent | EndingEvent | FinishedEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnOutcome:
    """End of a turn, as the decode leader tells the router. `kv_tokens` and `shards` describe the KV on its ring.

    If the turn failed for the loss of one of its rings, `lost_role` is that ring's; its gateway may begin it again.
    """

    turn_id: str
    ok: bool
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    kv_tokens: int = 0
    shards: ShardMap = field(default_factory=lambda: ShardMap.of(()))
    lost_role: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingRegistration:
    """Ring announcement. `capacity_tokens` is the KV room of the whole ring.

    `num_ranks` ranks share the tokens, and each is `tp` processes that share the heads. `chunk_tokens` is the most
    tokens that one of the ring's prefill steps may compute, `step_budget` the most work units (0: the work of
    `chunk_tokens` tokens). A ring that `is_draining` takes no new turns; a ring that `is_leaving` counts as gone from
    now on. A ring that `is_rebuilding` failed, and `failure` says why the latest attempt to rebuild it failed (empty:
    no attempt has).

    A decode ring computes up to `max_direct_tokens` tokens of a prompt itself (0: none), if a step of them is predicted
    to take no longer than `max_direct_seconds`. It takes `max_batch` turns into one batch (0: not known).

    Other fields change from one announcement to the next. A prefill ring tells the work units that wait
    (`waiting_work`) and those it computes a second (`work_rate`; 0: not known). `free_tokens` are not held by running
    turns (None: not known). `spare_tokens` of them may retain more KV without eviction. `num_evictions` counts how
    often this incarnation has evicted retained KV of a sequence.
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
    num_evictions: int = 0
    max_batch: int = 0
    max_direct_tokens: int = 0
    max_direct_seconds: float = 0.0
    is_draining: bool = False
    is_leaving: bool = False
    is_rebuilding: bool = False
    failure: str = ""

    @property
    def doing(self) -> str:
        """Words for logs."""
        return "has left" if self.is_leaving else "drains" if self.is_draining else "serves"

    @property
    def size(self) -> str:
        """Words for logs and events, such as "2 ranks"."""
        return f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeSpan:
    """Span of time that is over. Times are from `time.monotonic`; `parts` lie within it."""

    name: str
    began: float
    ended: float
    attributes: Attributes = field(default_factory=dict)
    parts: tuple[TimeSpan, ...] = ()


def just_ended(name: str, seconds: float, attributes: Attributes) -> TimeSpan:
    """Return a span of so many seconds that ends now."""
    now = time.monotonic()
    return TimeSpan(name=name, began=now - seconds, ended=now, attributes=attributes)


class Tracer(Protocol):
    """Recorder of turns' spans."""

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Record spans of a turn in the trace `trace_parent`; ignore them if that is empty.

        Never waits.
        """


class NoTracer:
    """Recorder for a service without traces."""

    def record(self, trace_parent: str, spans: Sequence[TimeSpan]) -> None:
        """Ignore the spans."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SendKv:
    """Request to send retained KV of `tokens` to a ring whose ranks expect it at the places `shards`.

    Each rank there is `tp` processes. `turn_id` is of the turn that holds the KV on the source; empty if none does.
    """

    transfer_id: str
    attempt: int
    kv_id: str
    turn_id: str = ""
    source_incarnation: str
    destination_incarnation: str
    tokens: TokenRange
    shards: ShardMap
    kv_endpoints: tuple[str, ...]
    deadline_seconds: float
    tp: int = 1

    @property
    def key(self) -> TransferKey:
        """Key of the transfer on the ranks of both rings."""
        return TransferKey(self.transfer_id, self.attempt, self.source_incarnation, self.destination_incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class SentKv:
    """Size and duration of a transfer."""

    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeKv:
    """Request to fetch the KV of the first `num_tokens` tokens from another ring, and to retain it.

    `deadline_seconds` bounds the transfer of the bytes. After a failed transfer the next one takes another `attempt`,
    or another id.
    """

    transfer_id: str
    attempt: int
    kv_id: str
    num_tokens: int
    source_role: str
    source_endpoint: str
    source_incarnation: str
    deadline_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenKv:
    """Location of KV that a ring has taken over from another."""

    incarnation: str
    shards: ShardMap
    payload_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkKv:
    """Request to begin `kv_id` with the retained KV of the first `num_tokens` tokens of `source_id`."""

    source_id: str
    kv_id: str
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedKv:
    """Part of the source's KV that the ring retained, and that both sequences share now."""

    incarnation: str
    shards: ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class RetainedKv:
    """Number of tokens, for each id asked for, whose KV is on this incarnation of a ring."""

    incarnation: str
    num_tokens: tuple[int, ...]

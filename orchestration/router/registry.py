"""Registry of the router's running turns, which ends each of them once and tells both rings how much KV to retain.

Admission enters turns, `TurnLifecycle` and `TurnRecovery` move them, the router ends them. A turn's state lasts from
`begin_turn` to `end_turn`; ended turns are remembered for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from ringserve.cp_core.errors import LOSSES, RingserveError, TurnCancelled, Unavailable
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.conversations.prefixes import PromptUnderWay
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, KvLocations, WantedTurn, spare_role
from ringserve.orchestration.placement.planner import RetainedPrefix
from ringserve.orchestration.placement.registry import LoadShare, RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, JournalPort, RingIncarnation
from ringserve.orchestration.protocol.plans import PromptMode, SparsePlan, TurnPlan
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndedAnswer,
    PrefillDone,
    Reservation,
    RetainingRing,
    TurnOutcome,
    TurnRequest,
    tenant_of,
)
from ringserve.orchestration.tasks import TaskSet, until_reached
from ringserve.workers.protocol.steps import Algorithm, TokenIds

MAX_REMEMBERED = 4096
"""Most ended turns that are remembered, so that a second report of an end is harmless."""
MAX_ANSWER_TOKENS = 1 << 19
"""Most tokens of all remembered answers, which are kept for turns whose gateway was lost or lost the stream."""
log = logging.getLogger(__name__)
LEASE_SECONDS = 30.0
"""Seconds past a turn's deadline after which the router ends the turn itself."""
FAILOVER_SECONDS = 10.0
"""Seconds that a turn which lost a ring waits for its gateway to begin it again."""
END_SECONDS = 1.0
"""Seconds that a turn's end, and so the client's last message, waits at most for the prefill ring to settle."""


def new_turn_id() -> str:
    """Return an id that no other turn has."""
    return f"turn-{uuid.uuid4().hex[:16]}"


class TurnState(Enum):
    """Running turn states; `RunningTurn` draws the transitions."""

    RESERVING = auto()
    PREFILLING = auto()
    DECODING = auto()
    RESUMING = auto()
    LOST = auto()
    ENDING = auto()
    ENDED = auto()


ALLOWED = {
    TurnState.RESERVING: {TurnState.PREFILLING, TurnState.ENDING},
    TurnState.PREFILLING: {TurnState.DECODING, TurnState.RESUMING, TurnState.LOST, TurnState.ENDING},
    TurnState.DECODING: {TurnState.RESUMING, TurnState.LOST, TurnState.ENDING},
    TurnState.RESUMING: {TurnState.PREFILLING, TurnState.RESUMING, TurnState.LOST, TurnState.ENDING},
    TurnState.LOST: {TurnState.RESERVING, TurnState.ENDING},
    TurnState.ENDING: {TurnState.ENDED},
    TurnState.ENDED: set(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """Decisions of admission about a turn, whatever its rings.

    `wanted` is for the first attempt. With `sparse`, every attempt of the turn and all KV that it makes are
    approximate. By `under_way` other turns find the prompt: they wait until it has been computed, then share its KV.
    `taken_at` is when the router took the turn.
    """

    conversation: Conversation
    prompt: TokenIds
    mode: PromptMode
    wanted: WantedTurn
    sparse: SparsePlan | None = None
    under_way: PromptUnderWay | None = None
    taken_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class Attempt:
    """Attempt under way: its rings, their reservations, and its prefill.

    `TurnLifecycle` writes it. `TurnRegistry` puts another in its place if the turn moves to other rings. A preempted
    turn keeps its attempt, with the next `number`: it counts from 1 how often KV is made for the decode ring. `decoded`
    are tokens generated before, whose KV is made as well. Without a prefill ring the decode ring computes the prompt,
    until the turn is resumed.

    `on_prefill` and `on_decode` are the rings' reservations, None until the rings have answered. `refused` are rings
    that had no room for the turn, or were gone. `left` are rings that retain KV of the conversation and are none of the
    turn's own; the prefill ring pulls from `pulled_from`. `is_on_prefill_ring`: the prefill ring has begun to make the
    turn's KV, so what it holds under the KV id are the turn's own tokens.
    """

    wanted: WantedTurn
    choice: Choice
    load_share: LoadShare
    number: int = 1
    decoded: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    refused: list[RegisteredRing] = field(default_factory=list)
    on_prefill: Reservation | None = None
    on_decode: Reservation | None = None
    left: list[RetainedPrefix] = field(default_factory=list)
    pulled_from: RetainingRing | None = None
    plan: TurnPlan | None = None
    prefilling: asyncio.Task[PrefillDone] | None = None
    resuming: asyncio.Task[None] | None = None
    is_on_prefill_ring: bool = False


@dataclass(slots=True)
class Recovery:
    """State that a turn needs to go on after the loss of a ring; `TurnRecovery` writes it.

    `lost_role` is the lost ring's role, which `TurnRegistry` notes. `emitted` are the answer tokens that the client had
    then. `earlier` are the rings of earlier attempts. They may hold KV under the conversation's id or, without a
    conversation, under `lone_kv_id`, the turn's first id.
    """

    lost_role: str = ""
    emitted: tuple[int, ...] = ()
    lone_kv_id: str = ""
    earlier: list[RegisteredRing] = field(default_factory=list)


@dataclass(slots=True)
class RunningTurn:
    """Turn whose rings have been chosen.

        RESERVING ──all rings have reserved──> PREFILLING ──prompt computed──────> DECODING
         │  │  ^                                │  │   ^                            │  │
         │  └──┘ refused: other rings, new id   │  │   └──reserved── RESUMING <─(1)─┘  │
         │                                      │  └──preempted early──> │  ^          │
         │                                      │                        │  └─ (2)     │
         └──────────────────────────────────────┴────────────────────────┴─────────────┴──> ENDING ──> ENDED

        (1) preempted, has room again           (2) a resumption failed: next attempt

        PREFILLING, DECODING, RESUMING ──a ring is lost──> LOST ──the gateway begins it again──> RESERVING

    Before RESERVING a request waits for its conversation and for rings that return; it is no turn yet. ENDING follows a
    failure in any state, the decode leader's `end_turn`, and LOST if no gateway begins the turn again in time. ENDING
    settles both rings and updates the conversation; ENDED has left the registry.

    `request` is as its latest gateway sent it. `TurnRegistry` writes the id and all that ends the turn: `lease` ends a
    turn whose end nobody reports, `stop_error` one that is being reserved, which its rings do not know yet; the decode
    ring retains `retain_tokens` after the end. Each of the other parts says who writes it.
    """

    turn_id: str
    request: TurnRequest
    admitted: Admitted
    attempt: Attempt
    recovery: Recovery = field(default_factory=Recovery)
    state: TurnState = TurnState.RESERVING
    lease: asyncio.TimerHandle | None = None
    ending: asyncio.Task[None] | None = None
    retain_tokens: int = 0
    stop_error: RingserveError | None = None

    def to(self, following: TurnState) -> None:
        """Take the next state. A transition that the diagram lacks is a bug."""
        assert following in ALLOWED[self.state], f"no turn goes from {self.state.name} to {following.name}"
        self.state = following
        if self.admitted.under_way is not None and following in (TurnState.RESUMING, TurnState.LOST, TurnState.ENDED):
            self.admitted.under_way.end()

    def give_up_prompt(self) -> None:
        """If the prompt has not been computed, let others wait for it no longer.

        If the turn ends well, this is not called, and others wait for its end: the end of a short answer may be
        reported before that of its prefill. They then share the KV of both.
        """
        if self.admitted.under_way is not None and self.admitted.under_way.places is None:
            self.admitted.under_way.end()

    @property
    def is_over(self) -> bool:
        """True if the turn has ended, or is about to."""
        return self.state in (TurnState.ENDING, TurnState.ENDED)

    @property
    def prefill(self) -> RegisteredRing | None:
        """Prefill ring; None if the decode ring computes the prompt."""
        return None if self.attempt.choice.is_direct else self.attempt.choice.prefill

    @property
    def decode(self) -> RegisteredRing:
        """Decode ring."""
        return self.attempt.choice.decode

    @property
    def rings(self) -> tuple[RegisteredRing, ...]:
        """Rings that have, or will have, KV of the turn."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)

    @property
    def kv_id(self) -> str:
        """Id under which the rings hold the KV: the conversation's, or the turn's if it has none."""
        return self.admitted.conversation.conversation_id or self.recovery.lone_kv_id or self.turn_id

    @property
    def sparsity(self) -> Sparsity | None:
        """Sparsity of the KV that the turn makes; None: it is exact."""
        return None if self.admitted.sparse is None else self.admitted.sparse.sparsity

    @property
    def algorithm(self) -> Algorithm | None:
        """Algorithm that it asks for: pass-KV alone computes sparse turns."""
        return self.request.algorithm if self.admitted.sparse is None else Algorithm.PASS_KV

    @property
    def match_tokens(self) -> int:
        """Number of leading prompt tokens that agree with the conversation's history, without the prompt's last."""
        return self.admitted.wanted.match_tokens

    def match_on(self, ring: RegisteredRing) -> int:
        """Return how many of the matching tokens a ring may reuse: 0 if it has no KV of the conversation on record.

        A ring that is not on record may still hold KV of an earlier history, a part of which has been replaced since.
        Even the conversation's prefill ring may hold such KV beyond the tokens on record, if later turns did not use
        it.
        """
        return self.attempt.wanted.known_on(ring)

    def match_to_reserve(self, ring: RegisteredRing) -> int:
        """Return how many tokens a ring is asked to retain when it reserves.

        In a later attempt, a ring that made KV for this turn before holds the turn's own tokens alone: they are asked
        for.
        """
        return len(self.token_ids) - 1 if self._holds_own(ring) else self.match_on(ring)

    def shares_on(self, ring: RegisteredRing) -> str:
        """Return the id of the sequence whose KV the turn shares on a ring, if it is to share any."""
        return "" if self._holds_own(ring) else self.attempt.wanted.shares_on(ring)

    def is_spare_on(self, ring: RegisteredRing) -> bool:
        """Return whether a ring may evict the turn's KV before other KV, as a ring of the other role retains it too.

        Of unnamed histories each role retains one half for longer, so that both together retain twice as many.
        """
        is_unnamed = self.admitted.conversation.is_unnamed
        return is_unnamed and self.prefill is not None and spare_role(self.kv_id) == ring.role

    def _holds_own(self, ring: RegisteredRing) -> bool:
        return self.attempt.number > 1 and (ring is self.decode or self.attempt.is_on_prefill_ring)

    @property
    def token_ids(self) -> TokenIds:
        """All tokens whose KV the decode ring is to get."""
        # A prompt of a million tokens is 8 MB: it is copied only if there is something to add.
        prompt, decoded = self.admitted.prompt, self.attempt.decoded
        return np.concatenate([prompt, decoded]) if len(decoded) else prompt

    @property
    def told_plan(self) -> TurnPlan:
        """Plan as it is shown to clients. If an earlier router made it, only its outline is known."""
        attempt = self.attempt
        if attempt.plan is not None:
            return attempt.plan
        reserved = attempt.on_decode if self.prefill is None else attempt.on_prefill
        computing = attempt.choice.computing
        cached = reserved.retained_tokens if reserved is not None else 0
        return TurnPlan(
            algorithm=Algorithm.DECODE_RING if self.prefill is None else Algorithm.PASS_KV,
            reason="planned before the router restarted; the algorithm is no longer known",
            new_tokens=len(self.admitted.prompt) - cached,
            cached_tokens=cached,
            prefill_ring=computing.name,
            decode_ring=self.decode.name,
            prefill_ranks=computing.registration.num_ranks,
            decode_ranks=self.decode.registration.num_ranks,
            cached_sources=(),
            chunks=(),
            predicted_prefill_seconds=0.0,
            alternatives=(),
            prompt_mode=self.admitted.mode,
            sparse=self.admitted.sparse,
        )

    def as_begun(self, *, remembered_tokens: int = 0, ended: EndedAnswer | None = None) -> BegunTurn:
        """Return the turn as its gateway is told it."""
        return BegunTurn(
            turn_id=self.turn_id,
            decode_endpoint=self.decode.registration.endpoint,
            prompt_tokens=len(self.admitted.prompt),
            plan=self.told_plan,
            remembered_tokens=remembered_tokens,
            lost_role=self.recovery.lost_role,
            ended=ended,
            max_tokens=self.request.sampling.max_tokens,
        )

    @property
    def max_kv_tokens(self) -> int:
        """Tokens that its KV may come to."""
        return len(self.admitted.prompt) + self.request.sampling.max_tokens

    @property
    def is_retained(self) -> bool:
        """True if the KV outlives the turn."""
        return bool(self.admitted.conversation.conversation_id)

    @property
    def retained_on_prefill(self) -> int:
        """Number of the conversation's tokens whose KV the prefill ring retains if the turn fails."""
        return 0 if self.prefill is None else self._retained(self.prefill, self.attempt.on_prefill)

    @property
    def retained_on_decode(self) -> int:
        """Number of the conversation's tokens whose KV the decode ring retains if the turn fails."""
        return self._retained(self.decode, self.attempt.on_decode)

    def _retained(self, ring: RegisteredRing, reservation: Reservation | None) -> int:
        # A ring that refused has changed nothing: it still holds the tokens on record that agree with the prompt.
        place = self.admitted.conversation.places.at(ring.role)
        match = 0 if place is None or place.ring != ring.name else min(self.match_tokens, place.num_tokens)
        return match if reservation is None else min(match, reservation.retained_tokens)


def note_computed(turn: RunningTurn, done: PrefillDone) -> None:
    """Let others share the prompt, whose KV is on the turn's rings now."""
    prompt, decode = turn.admitted.under_way, turn.attempt.on_decode
    if prompt is None or decode is None:
        return
    # On which ranks of the decode ring the tokens lie does not matter here.
    shards = ShardMap.of(((TokenRange(0, len(turn.admitted.prompt)),),))
    prompt.computed(
        KvLocation(ring=turn.prefill.name, incarnation=turn.attempt.on_prefill.incarnation, shards=done.shards)
        if turn.prefill is not None and turn.attempt.on_prefill is not None
        else None,
        KvLocation(ring=turn.decode.name, incarnation=decode.incarnation, shards=shards),
    )


def on_decode_ring(turn: RunningTurn, outcome: TurnOutcome) -> KvLocation | None:
    """Return the conversation's KV on a decode ring; None if the ring lost it after the last token."""
    if not outcome.kv_tokens:
        return None
    assert turn.attempt.on_decode, "a turn that was decoded was reserved before"
    return KvLocation(ring=turn.decode.name, incarnation=turn.attempt.on_decode.incarnation, shards=outcome.shards)


def on_prefill_ring(turn: RunningTurn, done: PrefillDone | None) -> KvLocation | None:
    """Return the conversation's KV on a prefill ring when the turn is over.

    If the turn used no prefill ring, the conversation's earlier one lacks the new tokens. If the turn has also replaced
    a part of the history, that ring's KV counts only up to the common prefix.
    """
    if turn.prefill is None:
        before = turn.admitted.conversation.prefill
        return None if before is None else before.cut(turn.match_tokens)
    if done is None:
        return None
    assert turn.attempt.on_prefill, "what was prefilled there was reserved before"
    return KvLocation(ring=turn.prefill.name, incarnation=turn.attempt.on_prefill.incarnation, shards=done.shards)


class EndedTurns:
    """Memory of the latest ends: tokens that the decode ring retains, by turn id, and answers, by request id.

    Answers of earlier routers are in the journal.
    """

    def __init__(self, journal: JournalPort) -> None:
        self._journal = journal
        self._retained: OrderedDict[str, int] = OrderedDict(journal.ended())
        self._answers: OrderedDict[str, BegunTurn] = OrderedDict()
        self._num_tokens = 0

    def note(self, turn_id: str, retain_tokens: int) -> None:
        """Remember how many tokens the decode ring of an ended turn retains."""
        self._retained[turn_id] = retain_tokens
        while len(self._retained) > MAX_REMEMBERED:
            self._retained.popitem(last=False)

    def retained(self, turn_id: str) -> int:
        """Return how many tokens the decode ring retains of a turn; 0 if it is not remembered."""
        return self._retained.get(turn_id, 0)

    def forget(self, turn_id: str) -> None:
        """Forget the end of a turn that goes on after all."""
        self._retained.pop(turn_id, None)

    def note_answer(self, turn: RunningTurn, token_ids: tuple[int, ...]) -> None:
        """Remember the answer of a turn that has ended well."""
        request_id = turn.request.request_id
        self._forget(request_id)
        ended = EndedAnswer(token_ids=token_ids, seed=turn.request.sampling.seed)
        self._answers[request_id] = turn.as_begun(ended=ended)
        self._num_tokens += len(token_ids)
        while len(self._answers) > MAX_REMEMBERED or self._num_tokens > MAX_ANSWER_TOKENS:
            self._forget(next(iter(self._answers)))

    def answer_of(self, request_id: str) -> BegunTurn | None:
        """Return the answer of a request whose turn ended well, while it is remembered."""
        return self._answers.get(request_id) or self._journal.answer_of(request_id)

    def _forget(self, request_id: str) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.ended is not None:
            self._num_tokens -= len(answer.ended.token_ids)


INTERRUPTED = (TurnState.PREFILLING, TurnState.DECODING, TurnState.RESUMING)
"""States of a turn that the loss of a ring interrupts."""


class TurnRegistry:
    """Registry of running turns by turn id and by request id. Ends turns exactly once, whatever ends them.

    `on_given_up` is called before a turn is ended because nobody reported its end.
    """

    def __init__(
        self,
        peers: Peers,
        rings: RingRegistry,
        conversations: ConversationStore,
        tasks: TaskSet,
        control_timeout: float,
        journal: JournalPort,
    ) -> None:
        self._journal = journal
        self._peers = peers
        self._tasks = tasks
        self._rings = rings
        self._conversations = conversations
        self._control_timeout = control_timeout
        self._running: dict[str, RunningTurn] = {}
        self._turn_of_request: dict[str, str] = {}
        self.ended = EndedTurns(journal)
        self.on_given_up: Callable[[BegunRecord, Conversation], None] = lambda record, conversation: None

    def __len__(self) -> int:
        return len(self._running)

    def add(self, turn: RunningTurn) -> None:
        """Enter a turn, count it to its rings, and start its lease."""
        self.lease(turn, turn.request.deadline_seconds + LEASE_SECONDS)
        self._enter(turn)

    def lease(self, turn: RunningTurn, seconds: float) -> None:
        """End the turn in so many seconds, unless its end is reported before."""
        if turn.lease is not None:
            turn.lease.cancel()
        turn.lease = asyncio.get_running_loop().call_later(seconds, self._end_unreported, turn)

    def move(self, turn: RunningTurn, choice: Choice, load_share: LoadShare) -> str:
        """Move an attempt that a ring refused to other rings, under a new turn id. Return the old id.

        The old id counts as ended. If the rings that the turn leaves report its end, nothing ends, and they are told to
        retain what the conversation had there.
        """
        before, attempt = self.rename(turn), turn.attempt
        moved = replace(attempt, choice=choice, load_share=load_share, on_prefill=None, on_decode=None)
        self._replace(turn, moved)
        return before

    def begin_again(self, turn: RunningTurn, attempt: Attempt) -> None:
        """Let another attempt take the place of a lost one, under a new turn id."""
        self.rename(turn)
        self._replace(turn, attempt)

    def _replace(self, turn: RunningTurn, attempt: Attempt) -> None:
        _count(turn, -1)
        turn.attempt.load_share.end_prefill()
        turn.attempt = attempt
        _count(turn, 1)

    def rename(self, turn: RunningTurn) -> str:
        """Give a turn a new id, so that its rings' reports on the old id no longer count. Return the old id."""
        before = turn.turn_id
        self.ended.note(before, turn.retained_on_decode)
        del self._running[before]
        self._journal.failed(before)
        turn.turn_id = new_turn_id()
        self._running[turn.turn_id] = turn
        self._turn_of_request[turn.request.request_id] = turn.turn_id
        return before

    def take_prefill_ring(self, turn: RunningTurn, choice: Choice) -> None:
        """Give a prefill ring to a turn that had none."""
        _count(turn, -1)
        turn.attempt.choice = choice
        _count(turn, 1)

    def note_begun(self, turn: RunningTurn) -> Awaitable[None]:
        """Write a turn to the journal as it is now. The awaitable ends when the record is durable."""
        return self._journal.begun(_record_of(turn))

    def of_tenant(self, tenant: str) -> Iterator[RunningTurn]:
        """Return the running turns whose request id is `tenant/...`."""
        return (turn for turn in self._running.values() if tenant_of(turn.request.request_id) == tenant)

    def of_request(self, request_id: str) -> RunningTurn | None:
        """Return the running turn of a request."""
        return self._running.get(self._turn_of_request.get(request_id, ""))

    def of_turn(self, turn_id: str) -> RunningTurn | None:
        """Return a running turn by its id."""
        return self._running.get(turn_id)

    def _enter(self, turn: RunningTurn) -> None:
        self._running[turn.turn_id] = turn
        self._turn_of_request[turn.request.request_id] = turn.turn_id
        _count(turn, 1)

    # --- ends --------------------------------------------------------------------------------------------------------

    def interrupt(self, turn: RunningTurn, role: str) -> None:
        """Hold a turn that lost its ring of `role`, until its gateway begins it again or its lease ends."""
        turn.to(TurnState.LOST)
        turn.recovery.lost_role = role
        turn.attempt.load_share.end_prefill()
        self.lease(turn, FAILOVER_SECONDS)

    async def end(self, outcome: TurnOutcome) -> int:
        """End a turn. Return how many tokens its decode ring should retain. Idempotent.

        The answer is first written to the journal. If that fails, Unavailable is raised, and the turn does not end. A
        turn that lost a ring does not end here, but waits for its gateway. If the prefill ring does not answer within
        END_SECONDS, this returns, and the end goes on in the background. The conversation takes its next turn after
        that.
        """
        turn = self._running.get(outcome.turn_id)
        if turn is None:
            return self.ended.retained(outcome.turn_id)
        if outcome.lost_role and turn.ending is None and self._goes_on(turn, outcome.lost_role):
            return turn.retained_on_decode
        if turn.ending is None and outcome.ok:
            await self._note_answer(turn, outcome)
        if turn.ending is None:
            self._start_ending(turn, outcome)
        assert turn.ending is not None, "just started"
        await asyncio.wait([turn.ending], timeout=END_SECONDS)
        if turn.ending.done():
            turn.ending.result()  # raises the error of a bug
        return turn.retain_tokens

    async def _note_answer(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        record = CommittedRecord(
            turn_id=turn.turn_id,
            answer=np.asarray(outcome.token_ids, dtype=np.int64),
            plan=turn.told_plan,
            finish_reason=outcome.finish_reason,
            kv_tokens=outcome.kv_tokens if turn.is_retained else 0,
            ended_at=time.time(),
        )
        await self._journal.committed(record)

    def _goes_on(self, turn: RunningTurn, lost_role: str) -> bool:
        """Note that a turn lost a ring. Return False if the turn must end, because it has not begun."""
        if turn.state is TurnState.RESERVING:
            if turn.recovery.lost_role:  # it is being begun again: `TurnRecovery` tries once more
                turn.stop_error = Unavailable(f"ring {turn.decode.name} was lost before the turn went on")
            return bool(turn.recovery.lost_role)
        if turn.state is not TurnState.LOST:
            self.interrupt(turn, lost_role)
        return True

    async def abort(self, turn: RunningTurn, error: RingserveError) -> None:
        """End a turn where its client waits, on the decode ring's stream; directly if that ring cannot be told."""
        turn_id, is_lost = turn.turn_id, turn.state is TurnState.LOST
        turn.stop_error = error  # for a turn that is being reserved, which the ring does not know yet
        if is_lost or not await self._told_decode(turn, error):
            await self.end(TurnOutcome(turn_id=turn_id, ok=False))

    async def fail(self, turn: RunningTurn, error: RingserveError) -> None:
        """End an attempt whose prefill failed. The client, who waits on the decode ring's stream, is told there."""
        turn_id = turn.turn_id
        await self._told_decode(turn, error)
        # If that ring did not know the turn any more, it reports no end.
        await self.end(TurnOutcome(turn_id=turn_id, ok=False, lost_role="prefill" if isinstance(error, LOSSES) else ""))

    async def drop(self, turn: RunningTurn, reason: RingserveError) -> None:
        """End a turn that failed before a client could wait on it."""
        turn_id = turn.turn_id
        await self._told_decode(turn, reason)
        await self.end(TurnOutcome(turn_id=turn_id, ok=False))

    def lose(self, ring: RegisteredRing, error: Unavailable) -> None:
        """Interrupt the turns that a lost ring was to decode; their gateways see it by themselves.

        A turn that is being reserved, or prefilled on that ring, ends because its call to the ring fails.
        """
        for turn in list(self._running.values()):
            if turn.decode is ring and turn.state in INTERRUPTED:
                log.warning("turn %s is lost: %s", turn.turn_id, error)
                self.interrupt(turn, "decode")
                # A leader that only hung would go on decoding.
                self._tasks.spawn(self._tell_lost(turn.turn_id, ring.name, ring.registration.endpoint, error))

    async def _tell_lost(self, turn_id: str, ring: str, endpoint: str, error: Unavailable) -> None:
        try:
            await self._peers.leader("decode", endpoint).abort_turn(turn_id, error)
        except RingserveError as failure:
            log.info("decode ring %s could not be told to drop %s: %s", ring, turn_id, failure)

    async def _told_decode(self, turn: RunningTurn, error: RingserveError) -> bool:
        """Tell the decode ring to end a turn with `error`. Return False if it cannot be told."""
        ring, turn_id = turn.decode, turn.turn_id
        try:
            port = self._peers.leader("decode", ring.registration.endpoint)
            await ring.guarded(port.abort_turn(turn_id, error))
        except RingserveError as failure:
            log.warning("decode ring %s could not be told to end %s: %s", ring.name, turn_id, failure)
            return False
        return True

    def _end_unreported(self, turn: RunningTurn) -> None:
        """End a turn whose lease is over: its gateway and decode leader are gone, as neither has reported its end."""
        if turn.ending is None:
            log.warning("no end of turn %s was reported; it is ended now", turn.turn_id)
            if turn.attempt.on_decode is not None:
                self.on_given_up(_record_of(turn), turn.admitted.conversation)
            self._start_ending(turn, TurnOutcome(turn_id=turn.turn_id, ok=False))

    def _start_ending(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        turn.to(TurnState.ENDING)
        if not outcome.ok:
            turn.give_up_prompt()
            self._journal.failed(turn.turn_id)  # not awaited: a record that remains does no harm
        answered = outcome.kv_tokens if turn.is_retained else 0
        turn.retain_tokens = answered if outcome.ok else turn.retained_on_decode
        turn.ending = asyncio.create_task(self._end(turn, outcome))

    async def _end(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        if turn.attempt.resuming is not None:  # it may be reserving on the prefill ring, to be settled below
            await asyncio.gather(turn.attempt.resuming, return_exceptions=True)
        try:
            await (self._finish(turn, outcome) if outcome.ok else self._roll_back(turn))
            self._release_earlier(turn)
        finally:
            self._remove(turn)
            if outcome.ok:
                self.ended.note_answer(turn, outcome.token_ids)

    async def _finish(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        conversation = turn.admitted.conversation
        assert turn.attempt.prefilling, "a finished turn was prefilled"
        done: PrefillDone | None = None
        try:
            async with asyncio.timeout(self._control_timeout):
                done = await asyncio.shield(turn.attempt.prefilling)
        except (RingserveError, TimeoutError) as error:
            log.warning("ring %s lost the KV of %s: %s", turn.attempt.choice.computing.name, turn.kv_id, error)
        # The prefill ring retains the prompt and, after a preemption, the tokens decoded before it.
        await self._settle_prefill(turn, done.shards.num_tokens if done and turn.is_retained else 0)
        if not turn.is_retained:
            return
        await self._leave_other_rings(turn)
        conversation.last_turn, conversation.sparsity = turn.turn_id, turn.sparsity
        conversation.places = conversation.places.changed(
            prefill=on_prefill_ring(turn, done),
            decode=on_decode_ring(turn, outcome),
        )
        tokens = np.concatenate([turn.admitted.prompt, np.asarray(outcome.token_ids, dtype=np.int64)])
        self._conversations.finish(conversation, tokens, is_appended=turn.admitted.mode is PromptMode.APPEND)

    async def _roll_back(self, turn: RunningTurn) -> None:
        """Leave the conversation as before the turn. Rings have its KV as far as it agreed with the turn's prompt."""
        conversation = turn.admitted.conversation
        on_prefill, on_decode = turn.retained_on_prefill, turn.retained_on_decode
        await self._settle_prefill(turn, on_prefill)
        prefill, decode = conversation.prefill, conversation.decode
        # Rings that the turn never used still have all their KV of the conversation.
        reached, earlier = {ring.name for ring in turn.rings}, {ring.name for ring in turn.recovery.earlier}
        if prefill and prefill.ring in earlier:
            prefill = prefill.cut(turn.match_tokens)
        if decode and decode.ring in earlier:
            decode = decode.cut(turn.match_tokens)
        conversation.places = conversation.places.changed(
            prefill=prefill.cut(on_prefill) if prefill and prefill.ring in reached else prefill,
            decode=decode.cut(on_decode) if decode and decode.ring in reached else decode,
        )

    async def _settle_prefill(self, turn: RunningTurn, retain_tokens: int) -> None:
        """Settle the prefill ring, if the turn has one, and stop waiting for the prefill's answer.

        If the ring is lost, or does not answer within the control timeout, the call is repeated in the background until
        the turn's lease ends.
        """
        if turn.prefill is not None:
            settling = self._tasks.spawn(self._settle(turn, turn.prefill, retain_tokens))
            with suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(self._control_timeout):
                    await turn.prefill.guarded(asyncio.shield(settling))
        if turn.attempt.prefilling is not None:
            turn.attempt.prefilling.cancel()
            await asyncio.gather(turn.attempt.prefilling, return_exceptions=True)

    async def _settle(self, turn: RunningTurn, ring: RegisteredRing, retain_tokens: int) -> None:
        port, turn_id = self._peers.leader("prefill", ring.registration.endpoint), turn.turn_id
        is_computing = turn.attempt.prefilling is not None and not turn.attempt.prefilling.done()

        async def settle() -> None:
            if is_computing:
                await port.abort_turn(turn_id, TurnCancelled("the turn ended"))
            await port.settle(turn.kv_id, turn_id, retain_tokens)

        assert turn.lease is not None, "a running turn has a lease"
        what = f"prefill ring {ring.name} could not settle {turn_id}"
        try:
            await until_reached(settle, what, turn.lease.when())
        except RingserveError as error:
            log.warning("%s: %s", what, error)

    def _remove(self, turn: RunningTurn) -> None:
        turn.to(TurnState.ENDED)
        if turn.lease is not None:
            turn.lease.cancel()
        del self._running[turn.turn_id]
        del self._turn_of_request[turn.request.request_id]
        _count(turn, -1)
        turn.attempt.load_share.end_prefill()
        self._conversations.close(turn.admitted.conversation)
        self.ended.note(turn.turn_id, turn.retain_tokens)

    def _release_earlier(self, turn: RunningTurn) -> None:
        """Release KV of a turn's earlier attempts on rings that it left. They retain the conversation's own KV."""
        for ring in turn.recovery.earlier:
            if ring in turn.rings:
                continue
            place = turn.admitted.conversation.places.at(ring.role)
            retain = place.num_tokens if place is not None and place.ring == ring.name else 0
            self._tasks.spawn(self._settle_earlier(ring, turn.kv_id, retain))

    async def _settle_earlier(self, ring: RegisteredRing, kv_id: str, retain_tokens: int) -> None:
        try:
            await self._peers.leader(ring.role, ring.registration.endpoint).settle(kv_id, "", retain_tokens)
        except RingserveError as error:
            log.info("ring %s could not be told to free %s: %s", ring.name, kv_id, error)

    async def _leave_other_rings(self, turn: RunningTurn) -> None:
        """Release the conversation's KV on rings that it used before this turn and that the turn did not use."""
        old = turn.admitted.conversation
        freed = Conversation(old.conversation_id)
        freed.places = KvLocations(
            prefill=old.prefill if old.prefill and turn.prefill and old.prefill.ring != turn.prefill.name else None,
            decode=old.decode if old.decode and old.decode.ring != turn.decode.name else None,
        )
        await self.free(freed)

    async def free(self, conversation: Conversation) -> None:
        """Release an idle conversation's KV on every ring that can be reached."""
        for role, place in conversation.places.items():
            ring = self._rings.named(role, place.ring)
            if ring is None:
                continue
            try:
                port = self._peers.leader(role, ring.registration.endpoint)
                await port.settle(conversation.conversation_id, "", retain_tokens=0)
            except RingserveError as error:
                log.warning("ring %s could not free %s: %s", ring.name, conversation.conversation_id, error)


def _record_of(turn: RunningTurn) -> BegunRecord:
    # A new conversation's prompt is written whole, even if others share its KV.
    base = turn.match_tokens if turn.request.conversation_id and turn.admitted.conversation.has_finished else 0
    prompt, ttl = turn.admitted.prompt[base:], turn.admitted.conversation.ttl_seconds
    return BegunRecord(
        turn_id=turn.turn_id,
        request=replace(
            turn.request,
            token_ids=prompt,
            conversation_ttl_seconds=ttl,
            prompt_mode=turn.admitted.mode,
            num_special=0,
        ),
        base_tokens=base,
        prefill=_incarnation(turn.prefill) if turn.prefill else None,
        decode=_incarnation(turn.decode),
        attempt=turn.attempt.number,
        begun_at=time.time(),
        sparse=turn.admitted.sparse,
    )


def _incarnation(ring: RegisteredRing) -> RingIncarnation:
    return RingIncarnation(ring=ring.name, incarnation=ring.registration.incarnation)


def _count(turn: RunningTurn, change: int) -> None:
    """Add a turn to the counts of its rings, or take it out."""
    for ring in turn.rings:
        ring.num_turns += change

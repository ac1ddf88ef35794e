"""State of one turn between `begin_turn` and `end_turn`, as the router sees it, and the memory of ended turns."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from ringserve.cp_core.errors import RingserveError
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.conversations.conversation import Conversation
from ringserve.orchestration.conversations.prefixes import PromptUnderWay
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, WantedTurn, spare_role
from ringserve.orchestration.placement.planner import RetainedPrefix
from ringserve.orchestration.placement.registry import LoadShare, RegisteredRing
from ringserve.orchestration.protocol.journal import JournalPort
from ringserve.orchestration.protocol.plans import PromptMode, SparsePlan, TurnPlan
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndedAnswer,
    PrefillDone,
    Reservation,
    RetainingRing,
    TurnOutcome,
    TurnRequest,
)
from ringserve.workers.protocol.prefill_steps import Algorithm, TokenIds


def new_turn_id() -> str:
    """Return an id that no other turn has."""
    return f"turn-{uuid.uuid4().hex[:16]}"


class TurnState(Enum):
    """States of a running turn; `RunningTurn` draws the transitions."""

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
    """What admission has fixed for a turn, whatever rings it takes.

    `wanted` is what the first attempt wants. With `sparse` every attempt of the turn is approximate, and all KV that it
    makes. `under_way` lets others share the prompt, from the moment when it has been computed. `taken_at` is when the
    router took the turn.
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
    """Attempt under way: its rings, what they have reserved, and its prefill.

    `TurnLifecycle` writes it. `TurnRegistry` puts another in its place if the turn moves to other rings. A preempted
    turn keeps its own, with the next `number`, which counts from 1 how often KV is made for the decode ring. `decoded`
    are generated tokens whose KV is made as well. Without a prefill ring the decode ring computes the prompt, until
    the turn is resumed.

    `on_prefill` and `on_decode` are the rings' reservations, None until the rings have answered. `refused` are rings
    that had no room for the turn, or were gone. `left` are rings that retain KV of the conversation and are none of the
    turn's own; the prefill ring pulls from `pulled_from`. `is_on_prefill_ring`: that ring has begun to make the turn's
    KV, and holds no other tokens of the conversation.
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
    """What a turn that lost a ring needs to go on; `TurnRecovery` writes it.

    `lost_role` is the lost ring's role, which `TurnRegistry` notes. `emitted` are the answer tokens that the client
    had then. `earlier` are rings on which the turn was before. They may hold KV under `lone_kv_id`, the turn's first
    id, or its conversation's.
    """

    lost_role: str = ""
    emitted: tuple[int, ...] = ()
    lone_kv_id: str = ""
    earlier: list[RegisteredRing] = field(default_factory=list)


@dataclass(slots=True)
class RunningTurn:
    """Turn whose rings have been chosen.

        RESERVING ──all rings have reserved──> PREFILLING ──prompt computed──> DECODING
         │  │  ^                                │  │   ^                        │  │
         │  └──┘ refused: other rings, new id   │  │   └──reserved── RESUMING <─┘  │ preempted; has room again
         │                                      │  └──preempted early──> │  ^      │
         │                                      │                        │  └─ a resumption failed: next attempt
         └──────────────────────────────────────┴────────────────────────┴──────> ENDING ──> ENDED

        PREFILLING, DECODING, RESUMING ──a ring is lost──> LOST ──the gateway begins it again──> RESERVING

    Before RESERVING a request waits for its conversation and for rings that return; it is no turn yet. A failure in any
    state leads to ENDING, as the decode leader's `end_turn` does, and so does LOST if no gateway comes. ENDING
    settles both rings and updates the conversation; ENDED has left the registry.

    `request` is as its latest gateway sent it. `TurnRegistry` writes the id and all that ends the turn: `lease` ends a
    turn of which nobody tells, `stop_error` one that its rings do not know yet; the decode ring retains `retain_tokens`
    after the end. Each of the other parts says who writes it.
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
        """Let others wait no longer for a prompt that was not computed.

        If the turn ends well they wait until it has ended: the end of a short answer may be known before its
        prompt's, and then they share the whole.
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
        """Rings that have, or are to have, KV of the turn."""
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
        """Number of prompt tokens that begin the conversation so far, the prompt's last token excluded."""
        return self.admitted.wanted.match_tokens

    def match_on(self, ring: RegisteredRing) -> int:
        """Return how many of the matching tokens a ring may reuse: 0 if the ring is not the conversation's own.

        Another ring may still hold KV of an earlier state that has been overwritten since. The conversation's own
        prefill ring may hold such KV beyond its location's end, if later turns did without that ring.
        """
        return self.attempt.wanted.known_on(ring)

    def match_to_reserve(self, ring: RegisteredRing) -> int:
        """Return how many tokens a ring is asked to retain when it reserves.

        In a later attempt, a ring that made KV for this turn before holds the turn's own tokens alone.
        """
        return len(self.token_ids) - 1 if self._holds_own(ring) else self.match_on(ring)

    def shares_on(self, ring: RegisteredRing) -> str:
        """Return the id of the sequence whose KV the turn shares on a ring, if it is to share any."""
        return "" if self._holds_own(ring) else self.attempt.wanted.shares_on(ring)

    def is_spare_on(self, ring: RegisteredRing) -> bool:
        """Return whether a ring may evict the KV first after the turn, since a ring of the other role retains it too.

        Each retains half of the unnamed histories for longer, so that both together retain twice as many.
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
        """Plan as clients are told it. Of a turn that an earlier router planned, only the outlines are known."""
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
        """Tokens of the conversation whose KV stays on the prefill ring if the turn fails."""
        return 0 if self.prefill is None else self._retained(self.prefill, self.attempt.on_prefill)

    @property
    def retained_on_decode(self) -> int:
        """Tokens of the conversation whose KV stays on the decode ring if the turn fails."""
        return self._retained(self.decode, self.attempt.on_decode)

    def _retained(self, ring: RegisteredRing, reservation: Reservation | None) -> int:
        # A ring that refused has cut nothing beyond what agrees with the prompt.
        place = self.admitted.conversation.places.at(ring.role)
        match = 0 if place is None or place.ring != ring.name else min(self.match_tokens, place.num_tokens)
        return match if reservation is None else min(match, reservation.retained_tokens)


def note_computed(turn: RunningTurn, done: PrefillDone) -> None:
    """Let others share the prompt, which both rings have now. Its tokens lie there in ways that do not matter here."""
    prompt, decode = turn.admitted.under_way, turn.attempt.on_decode
    if prompt is None or decode is None:
        return
    shards = ShardMap.of(((TokenRange(0, len(turn.admitted.prompt)),),))
    prompt.computed(
        KvLocation(ring=turn.prefill.name, incarnation=turn.attempt.on_prefill.incarnation, shards=done.shards)
        if turn.prefill is not None and turn.attempt.on_prefill is not None
        else None,
        KvLocation(ring=turn.decode.name, incarnation=decode.incarnation, shards=shards),
    )


def on_decode_ring(turn: RunningTurn, outcome: TurnOutcome) -> KvLocation | None:
    """Return what a decode ring retains of the conversation; None if it was lost after the last token."""
    if not outcome.kv_tokens:
        return None
    assert turn.attempt.on_decode, "a turn that was decoded was reserved before"
    return KvLocation(ring=turn.decode.name, incarnation=turn.attempt.on_decode.incarnation, shards=outcome.shards)


def on_prefill_ring(turn: RunningTurn, done: PrefillDone | None) -> KvLocation | None:
    """Return what a prefill ring retains of the conversation when the turn is over.

    A ring that the turn did without lags behind. If the turn has changed the history, the ring's KV beyond the
    common prefix no longer counts.
    """
    if turn.prefill is None:
        before = turn.admitted.conversation.prefill
        return None if before is None else before.cut(turn.match_tokens)
    if done is None:
        return None
    assert turn.attempt.on_prefill, "what was prefilled there was reserved before"
    return KvLocation(ring=turn.prefill.name, incarnation=turn.attempt.on_prefill.incarnation, shards=done.shards)


MAX_REMEMBERED = 4096
"""Ended turns that are remembered, so that telling an end twice is harmless."""
MAX_ANSWER_TOKENS = 1 << 19
"""Tokens of ended answers that are remembered together, for gateways that were lost or lost the stream."""


class EndedTurns:
    """Memory of the latest ends: how much a decode ring retains by turn id, and answers by request id.

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

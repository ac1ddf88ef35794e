"""Turn recovery: after a restart of the router, and after the loss of a ring or of a gateway. The router calls it.

A router that was started again adopts the turns of its predecessor:

    begun, says the journal ──both rings have sent their inventory──> adopted: runs as if this router had begun it
            │                                                            ^
            ├──only its decode ring has sent it in time─────────────────┘
            ├──its decode ring holds no such turn──> failed: the conversation is as before the turn
            └──its decode ring has sent nothing in time──> given up: the conversation is as before the turn
                   └──later its decode ring reports it, or its end, and the conversation has not changed──> adopted

A turn of this router is given up in the same way if neither its rings nor its gateway have told of it in time. Rings
may also hold turns that the journal lacks, because the earlier router died before it had written them. These turns are
ended. KV on a ring that belongs to no conversation there is released, because no turn would release it: KV of
conversations that have left the ring or were deleted, and of requests that named none.

A running turn that lost a ring, or its stream, is begun again and goes on after the tokens that its client has. Each
new attempt has a new turn id, so that a late end of an earlier attempt does not count. The turn keeps its conversation,
its place among its tenant's turns, and the KV that its prefill ring has made.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ringserve.cp_core.errors import (
    Busy,
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    RingserveError,
    TurnCancelled,
    Unavailable,
)
from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, WantedTurn
from ringserve.orchestration.placement.placer import RingPlacer
from ringserve.orchestration.placement.registry import RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.inventory import RingInventory, SequenceOnRing, TurnOnRing
from ringserve.orchestration.protocol.journal import BegunRecord, JournalPort
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.rings import ROLES
from ringserve.orchestration.protocol.turns import BegunTurn, LostTurn, Reservation, TurnOutcome, TurnRequest
from ringserve.orchestration.router.admission import TurnAdmission
from ringserve.orchestration.router.drains import RingReturns
from ringserve.orchestration.router.lifecycle import TurnLifecycle
from ringserve.orchestration.router.registry import (
    LEASE_SECONDS,
    Admitted,
    Attempt,
    RunningTurn,
    TurnRegistry,
    TurnState,
)
from ringserve.orchestration.tasks import TaskSet, finish_despite_cancellation
from ringserve.workers.protocol.steps import RING_ALGORITHMS

log = logging.getLogger(__name__)

ADOPT_SECONDS = 5.0
"""Seconds after its start in which a router waits for the inventories of rings."""
LATE_SECONDS = 2.0
"""Seconds after its start in which a router begins no turn until every expected ring has sent its inventory.

Else the first rings would compute prompts whose KV other rings retain.
"""
LEAST_SECONDS = 1.0
"""Least seconds that an adopted turn has left, even after its deadline, so that its decode ring can end it."""
RELEASE_SECONDS = 0.25
"""Seconds between two looks whether a conversation is idle: only then its KV on a ring may be released."""
FENCE_SECONDS = 2.0
"""Seconds that a ring has to release the attempt before. It may hang, so then the next attempt begins without it."""
RETRY_SECONDS = 0.25
"""Seconds between attempts to begin a turn for which no ring has room; news of a ring shorten them."""


@dataclass(slots=True)
class _Pending:
    """Turn that has begun according to the journal, with its rings' reports.

    `settled` is set when it has been adopted (`is_adopted`) or has failed.
    """

    record: BegunRecord
    conversation: Conversation
    on_prefill: TurnOnRing | None = None
    on_decode: TurnOnRing | None = None
    has_prefill_told: bool = False
    is_adopted: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """Turn that has failed because no ring reported it, and its conversation at that time."""

    record: BegunRecord
    num_tokens: int
    last_turn: str


class TurnRecovery:
    """Turns and KV that an earlier router began, and turns that lost a ring or their gateway.

    Turns of earlier epochs are `pending` from `restore` until each is adopted or has failed. From `restore` on,
    recovery `is_early` until `num_expected` rings have sent their inventories and rings of both roles serve. After
    LATE_SECONDS it is enough if rings of both roles serve; after ADOPT_SECONDS it is early no longer.

    A turn that is begun again is not refused for lack of room: it waits for rings until its deadline.
    """

    def __init__(
        self,
        journal: JournalPort,
        store: ConversationStore,
        rings: RingRegistry,
        turns: TurnRegistry,
        lifecycle: TurnLifecycle,
        admission: TurnAdmission,
        placer: RingPlacer,
        returns: RingReturns,
        peers: Peers,
        tasks: TaskSet,
        num_expected: int = 0,
    ) -> None:
        self._journal = journal
        self._store = store
        self._rings = rings
        self._turns = turns
        self._lifecycle = lifecycle
        self._admission = admission
        self._placer = placer
        self._returns = returns
        self._peers = peers
        self._tasks = tasks
        self.pending: dict[str, _Pending] = {}
        self.given_up: dict[str, _GivenUp] = {}
        turns.on_given_up = self._give_up
        self._num_expected = num_expected
        self._told: set[str] = set()
        self.is_early = self._is_late = False
        self._have_told = asyncio.Event()

    def restore(self) -> None:
        """Mark the conversations of the journal's turns as in use, and give the turns' rings time to report them."""
        for record in self._journal.turns():
            self.pending[record.turn_id] = _Pending(record, self._occupied(record))
        if self.pending:
            log.info("%d turns were running when the router before this one ended", len(self.pending))
        if self._journal.epoch > 1:
            self.is_early = True
            self._tasks.spawn(self._settle_all_in_time())

    def _occupied(self, record: BegunRecord) -> Conversation:
        request = record.request
        return self._opened(request.conversation_id, request.request_id)

    def _opened(self, name: str, request_id: str) -> Conversation:
        if not name:
            return Conversation("", running_request=request_id)
        conversation, dropped = self._store.open(name, request_id)
        for old in dropped:
            self._tasks.spawn(self._turns.free(old))
        return conversation

    async def until_settled(self, turn_id: str) -> None:
        """Wait until a pending turn is adopted, or has failed."""
        await self.pending[turn_id].settled.wait()

    async def until_request_settled(self, request_id: str) -> None:
        """Wait until no turn of the request is pending."""
        for pending in list(self.pending.values()):
            if pending.record.request.request_id == request_id:
                await pending.settled.wait()

    async def until_rings_told(self) -> None:
        """Wait until the expected rings have sent their inventories, or have had the time for it."""
        await self._have_told.wait()

    def _end_early_if_told(self) -> None:
        """Let turns begin once rings of both roles serve and all expected rings have reported, or are late."""
        have_all = self._is_late or len(self._told) >= self._num_expected
        if self.is_early and have_all and all(self._rings.ready(role) for role in ROLES):
            self._end_early()

    def _end_early(self) -> None:
        self.is_early = False
        self._have_told.set()

    async def until_all_settled(self) -> None:
        """Wait until no turn is pending."""
        for pending in list(self.pending.values()):
            await pending.settled.wait()

    async def _settle_all_in_time(self) -> None:
        late = min(LATE_SECONDS, ADOPT_SECONDS)
        await asyncio.sleep(late)
        self._is_late = True
        self._end_early_if_told()
        await asyncio.sleep(ADOPT_SECONDS - late)
        self._end_early()
        for pending in list(self.pending.values()):
            if pending.on_decode is not None:
                self._adopt(pending, pending.on_decode)
            else:
                self._fail(pending, f"its decode ring {pending.record.decode.ring} has told nothing")
                self._give_up(pending.record, pending.conversation)

    # --- inventories of rings ----------------------------------------------------------------------------------------

    def note(self, ring: RegisteredRing, inventory: RingInventory) -> None:
        """Note what a registered ring holds: adopt, fail or end its turns, enter its KV in the conversations."""
        here = {turn.turn_id: turn for turn in inventory.turns}
        for name in self.given_up.keys() & here.keys():
            if ring.role == "decode":
                self._reopen(name)
        for sequence in inventory.sequences:
            self._note_place(ring, sequence)
        awaited = {name: pending for name in here if (pending := self.pending.get(name))}
        orphans = [turn for name, turn in here.items() if not awaited.get(name) and self._turns.of_turn(name) is None]
        for pending in list(self.pending.values()):
            self._note_turn(pending, ring, here.get(pending.record.turn_id))
        self._told.add(ring.name)
        self._end_early_if_told()
        self._tasks.spawn(self._tidy(ring, inventory, awaited, orphans))

    def _note_turn(self, pending: _Pending, ring: RegisteredRing, turn: TurnOnRing | None) -> None:
        record = pending.record
        if ring.role == "prefill" and record.prefill is not None and record.prefill.ring == ring.name:
            pending.on_prefill, pending.has_prefill_told = turn, True
        elif ring.role == "decode" and record.decode.ring == ring.name:
            pending.on_decode = turn
            if turn is None:
                self._fail(pending, f"its decode ring {ring.name} no longer has it")
                return
        if pending.on_decode is not None and (pending.has_prefill_told or record.prefill is None):
            self._adopt(pending, pending.on_decode)

    def _note_place(self, ring: RegisteredRing, sequence: SequenceOnRing) -> None:
        """Note the KV that a ring retains of a conversation, as far as its tokens agree with the history."""
        conversation = self._store.known(sequence.kv_id)
        if conversation is None or not conversation.has_finished:
            return
        if self._turns.of_request(conversation.running_request) is not None:
            return  # a turn of this router uses the conversation, and notes its KV when it ends
        # The journal is asked only for KV that is not the latest turn's. A hundred thousand queries would take seconds.
        is_latest = sequence.last_turn != "" and sequence.last_turn == conversation.last_turn
        agreeing = conversation.num_tokens
        if not is_latest:
            agreeing = self._journal.num_agreeing(sequence.kv_id, sequence.last_turn)
        shards = sequence.shards if agreeing >= sequence.shards.num_tokens else sequence.shards.truncate(agreeing)
        known = conversation.places.at(ring.role)
        if shards.num_tokens and (known is None or known.num_tokens < shards.num_tokens):
            if known is not None and (left := self._rings.named(ring.role, known.ring)) is not None:
                self._tasks.spawn(self._release_unplaced(left, [sequence.kv_id]))
            place = KvLocation(ring=ring.name, incarnation=ring.registration.incarnation, shards=shards)
            conversation.places = conversation.places.put(ring.role, place)

    async def _tidy(
        self,
        ring: RegisteredRing,
        inventory: RingInventory,
        awaited: Mapping[str, _Pending],
        orphans: Sequence[TurnOnRing],
    ) -> None:
        """End the turns of a ring that do not go on, then release KV that belongs to no conversation there."""
        await asyncio.gather(*(self._end_orphan(ring, turn) for turn in orphans))
        for pending in awaited.values():
            await pending.settled.wait()
        failed = [turn for turn in inventory.turns if (each := awaited.get(turn.turn_id)) and not each.is_adopted]
        await asyncio.gather(*(self._end_orphan(ring, turn) for turn in failed))
        await self.until_all_settled()
        ended = {turn.turn_id for turn in (*orphans, *failed)}
        in_use = {turn.kv_id for turn in inventory.turns if turn.turn_id not in ended}
        names = [sequence.kv_id for sequence in inventory.sequences if sequence.kv_id not in in_use]
        await self._release_unplaced(ring, names)

    async def _release_unplaced(self, ring: RegisteredRing, kv_ids: Sequence[str]) -> None:
        """Release the sequences on a ring whose conversations do not have their KV there. Wait for each to be idle."""
        incarnation = ring.registration.incarnation
        port = self._peers.leader(ring.role, ring.registration.endpoint)
        while kv_ids:
            busy = []
            for kv_id in kv_ids:
                conversation = self._store.known(kv_id)
                place = None if conversation is None else conversation.places.at(ring.role)
                if conversation is not None and not conversation.is_idle:
                    busy.append(kv_id)
                elif place is None or place.ring != ring.name:
                    try:
                        await port.settle(kv_id, "", retain_tokens=0)
                    except RingserveError as error:
                        log.warning("ring %s could not free %s: %s", ring.name, kv_id, error)
            kv_ids = busy if ring.registration.incarnation == incarnation else ()
            await asyncio.sleep(RELEASE_SECONDS if kv_ids else 0.0)

    async def _end_orphan(self, ring: RegisteredRing, turn: TurnOnRing) -> None:
        """End a turn on a ring that does not go on. The ring retains the KV that the sequence had before the turn."""
        self._turns.ended.note(turn.turn_id, turn.retained_tokens)
        port = self._peers.leader(ring.role, ring.registration.endpoint)
        log.info("ring %s holds turn %s, which does not run; it is ended", ring.name, turn.turn_id)
        try:
            if ring.role == "prefill":
                await port.settle(turn.kv_id, turn.turn_id, turn.retained_tokens)
            else:
                lost = TurnCancelled("the router was started again before the turn had begun; retry")
                await port.abort_turn(turn.turn_id, lost)
        except RingserveError as error:
            log.warning("ring %s could not end turn %s: %s", ring.name, turn.turn_id, error)

    # --- adoption ----------------------------------------------------------------------------------------------------

    def _adopt(self, pending: _Pending, on_decode: TurnOnRing) -> None:
        """Let a turn go on as if this router had begun it."""
        record = pending.record
        decode = self._rings.named("decode", record.decode.ring)
        prefill = self._rings.named("prefill", record.prefill.ring) if record.prefill and pending.on_prefill else None
        if decode is None:
            self._fail(pending, f"its decode ring {record.decode.ring} has left")
            return
        if on_decode.kv_id not in (record.turn_id, record.request.conversation_id):
            # The request named no conversation, so it has an unnamed one, whose id only the rings know.
            pending.conversation = self._opened(on_decode.kv_id, record.request.request_id)
        turn = self._running(pending, prefill, decode, on_decode)
        pending.is_adopted = True
        self._settled(pending)
        self._turns.add(turn)
        computing = pending.on_prefill if record.prefill is not None else on_decode
        is_joinable = computing is not None and computing.is_begun
        self._lifecycle.rejoin(turn, is_joinable=is_joinable)
        log.info("turn %s of an earlier router goes on", turn.turn_id)
        if not is_joinable and not on_decode.is_sealed:
            lost = Unavailable("the ring that computed the prompt was lost while the router was started again; retry")
            self._tasks.spawn(self._turns.abort(turn, lost))

    def _running(
        self, pending: _Pending, prefill: RegisteredRing | None, decode: RegisteredRing, on_decode: TurnOnRing
    ) -> RunningTurn:
        record, conversation = pending.record, pending.conversation
        request = replace(record.request, deadline_seconds=max(LEAST_SECONDS, seconds_left(record)))
        prompt = request.token_ids
        if record.base_tokens:
            assert conversation.tokens is not None, "a turn with base tokens continues a conversation"
            prompt = np.concatenate([conversation.tokens[: record.base_tokens], prompt])
        wanted = WantedTurn(
            num_tokens=len(prompt),
            answer_tokens=request.sampling.max_tokens,
            match_tokens=record.base_tokens,
            prefill=conversation.prefill,
            decode=conversation.decode,
            algorithm=request.algorithm,
        )
        choice = Choice(prefill=prefill or decode, decode=decode, prefill_seconds=0.0, is_direct=prefill is None)
        share = self._rings.place(prefill, decode, prefill_seconds=0.0, num_tokens=0)
        admitted = Admitted(
            conversation=conversation, prompt=prompt, mode=request.prompt_mode, wanted=wanted, sparse=record.sparse
        )
        attempt = Attempt(wanted, choice, share, number=on_decode.attempt, on_decode=_reservation(decode, on_decode))
        if prefill is not None and pending.on_prefill is not None:
            attempt.on_prefill = _reservation(prefill, pending.on_prefill)
        return RunningTurn(record.turn_id, request, admitted, attempt)

    def _fail(self, pending: _Pending, why: str) -> None:
        turn_id = pending.record.turn_id
        log.warning("turn %s of an earlier router does not go on: %s", turn_id, why)
        self._journal.failed(turn_id)
        self._turns.ended.note(turn_id, 0)
        self._settled(pending)
        if pending.conversation.conversation_id:
            self._store.close(pending.conversation)

    # --- turns that were given up ------------------------------------------------------------------------------------

    def _give_up(self, record: BegunRecord, conversation: Conversation) -> None:
        """Remember a turn that has failed because nobody reported it, as long as its decode ring may report it."""
        self.given_up[record.turn_id] = _GivenUp(record, conversation.num_tokens, conversation.last_turn)
        seconds = seconds_left(record) + LEASE_SECONDS
        asyncio.get_running_loop().call_later(seconds, self.given_up.pop, record.turn_id, None)

    def _reopen(self, turn_id: str) -> _Pending | None:
        """Make a given-up turn pending again; None if its conversation has changed since or is in use."""
        given_up = self.given_up.pop(turn_id)
        record = given_up.record
        known = self._store.known(record.request.conversation_id) or Conversation("")
        is_as_before = (known.num_tokens, known.last_turn) == (given_up.num_tokens, given_up.last_turn)
        if not is_as_before or not known.is_idle:
            log.warning("turn %s was reported too late: its conversation has gone on without it", turn_id)
            return None
        self._turns.ended.forget(turn_id)
        self._journal.begun(record)
        # The prefill ring need not report the turn: it was told to end it.
        pending = self.pending[turn_id] = _Pending(record, self._occupied(record), has_prefill_told=True)
        return pending

    async def note_late_end(self, turn_id: str) -> None:
        """Adopt a turn that was given up, and whose good end its decode ring reports now.

        Raises Unavailable if that ring must first send its inventory.
        """
        turn = self._turns.of_turn(turn_id)
        if turn is not None and turn.ending is not None:
            await asyncio.wait([turn.ending])
        given_up = self.given_up.get(turn_id)
        if given_up is None:  # another report of the same end came before
            return
        place, request = given_up.record.decode, given_up.record.request
        ring = self._rings.named("decode", place.ring)
        if ring is None or ring.registration.incarnation != place.incarnation:
            raise Unavailable(f"ring {place.ring} has not announced itself yet; report the end again")
        pending = self._reopen(turn_id)
        if pending is not None:
            on_decode = TurnOnRing(
                turn_id=turn_id,
                kv_id=request.conversation_id or turn_id,
                attempt=given_up.record.attempt,
                retained_tokens=0,
                is_sealed=True,
            )
            self._adopt(pending, on_decode)

    def _settled(self, pending: _Pending) -> None:
        del self.pending[pending.record.turn_id]
        pending.settled.set()

    # --- turns that are begun again ----------------------------------------------------------------------------------

    async def begin_again(self, request: TurnRequest) -> BegunTurn | None:
        """Begin a turn again that lost a ring. If it has ended well meanwhile, return its answer.

        A turn that lost only its gateway goes on unchanged. A turn that the router does not know any more is admitted
        as a new one, with the answer so far. For a turn that may not have begun return None: the caller begins it.
        Raises DeadlineExceeded, TurnCancelled if it was aborted, Busy if another request has its id, and the errors of
        admission.
        """
        lost, deadline = request.resume, asyncio.get_running_loop().time() + request.deadline_seconds
        assert lost is not None, "the turn has begun before"
        turn = self._turns.of_request(request.request_id)
        if turn is not None and turn.ending is not None:
            await asyncio.shield(turn.ending)
            turn = None
        if turn is None:
            answer = self._turns.ended.answer_of(request.request_id)
            if answer is not None and _is_answer_of(answer, request, lost):
                return answer
            if not lost.turn_id and not lost.prompt_tokens:
                return None
            turn = await self._admit(request, lost, deadline)
        elif turn.request.sampling.seed != request.sampling.seed:
            raise Busy(f"request_id: {request.request_id!r} is running already for another request; choose another")
        elif turn.state is TurnState.RESERVING:
            raise Unavailable(f"request {request.request_id!r} is being begun already; retry")
        elif turn.state is not TurnState.LOST and not lost.turn_id:
            turn.request = replace(turn.request, reader=request.reader)
            return turn.as_begun(remembered_tokens=turn.admitted.conversation.num_tokens)
        elif turn.state is not TurnState.LOST:
            self._turns.interrupt(turn, "decode")
        if lost.is_complete and turn.state is TurnState.LOST:
            return await self._commit(turn, lost)
        try:
            turn.request = _without_scores(
                replace(
                    turn.request,
                    deadline_seconds=request.deadline_seconds,
                    sampling=replace(request.sampling, max_tokens=turn.request.sampling.max_tokens),
                    reader=request.reader,
                ),
                lost,
            )
            self._turns.lease(turn, request.deadline_seconds + LEASE_SECONDS)
            await self._begin(turn, lost, deadline)
        except BaseException as error:
            reason = error if isinstance(error, RingserveError) else TurnCancelled("the turn was cancelled")
            self._tasks.spawn(self._turns.drop(turn, reason))
            raise
        return turn.as_begun(remembered_tokens=turn.admitted.conversation.num_tokens)

    async def _admit(self, request: TurnRequest, lost: LostTurn, deadline: float) -> RunningTurn:
        """Admit a turn that the router does not know any more."""
        clock = asyncio.get_running_loop().time
        while True:
            try:
                seconds = max(deadline - clock(), 0.001)
                turn = await self._admission.admit(replace(request, wait=True, deadline_seconds=seconds))
                break
            except (CapacityExceeded, Unavailable):
                if clock() + RETRY_SECONDS >= deadline:
                    raise
                await self._returns.until_news(RETRY_SECONDS)
        if lost.prompt_tokens not in (0, len(turn.admitted.prompt)):
            self._tasks.spawn(self._turns.drop(turn, TurnCancelled("its conversation has changed")))
            raise NotFound(
                f"request {request.request_id!r} is not known any more, and its conversation has changed since it began"
            )
        turn.recovery.lost_role = "decode"
        return turn

    async def _commit(self, turn: RunningTurn, lost: LostTurn) -> BegunTurn:
        """End a turn as successful whose answer was complete when it lost its ring."""
        self._tasks.spawn(self._leave_decode(turn, turn.turn_id))
        await self._turns.end(TurnOutcome(turn_id=turn.turn_id, ok=True, token_ids=lost.token_ids))
        answer = self._turns.ended.answer_of(turn.request.request_id)
        if answer is None:  # its end waits for the prefill ring
            assert turn.ending is not None, "just ended"
            await asyncio.shield(turn.ending)
            answer = self._turns.ended.answer_of(turn.request.request_id)
        if answer is None:
            raise TurnCancelled("the turn was ended while it was to go on")
        return answer

    async def _begin(self, turn: RunningTurn, lost: LostTurn, deadline: float) -> None:
        """Begin attempts until one starts, or `deadline` (on the loop's clock) has come.

        Rings may refuse one or be lost.
        """
        clock = asyncio.get_running_loop().time
        made: KvLocation | None = None
        reason = ""
        while True:
            # If it ended half-way, the attempt before would stay pinned on its prefill ring, under an id that nobody
            # knows.
            made = await finish_despite_cancellation(self._fence(turn)) or made
            _check(turn)
            try:
                self._place(turn, lost, made)
                await self._lifecycle.try_start(turn)
                return
            except (Busy, CapacityExceeded, NotFound, Unavailable) as refusal:
                if turn.is_over or isinstance(turn.stop_error, TurnCancelled):
                    raise
                if clock() + RETRY_SECONDS >= deadline:
                    role = turn.recovery.lost_role
                    raise DeadlineExceeded(
                        f"the turn lost a {role} ring and could not go on within its deadline: {refusal}"
                    ) from refusal
                if str(refusal) != reason:  # one line for each reason, not for each attempt
                    reason = str(refusal)
                    log.info("request %s cannot go on yet: %s", turn.request.request_id, reason)
                await self._returns.until_news(RETRY_SECONDS)

    # --- the attempt before ------------------------------------------------------------------------------------------

    async def _fence(self, turn: RunningTurn) -> KvLocation | None:
        """End the latest attempt on its rings, as far as they can be reached, under a new turn id.

        Return where the prefill ring retains KV that need not be computed again; None if it retains none.
        """
        if not turn.is_retained:
            turn.recovery.lone_kv_id = turn.kv_id
        turn_id = self._turns.rename(turn)
        if turn.attempt.resuming is not None:  # it may be reserving on the prefill ring
            await asyncio.gather(turn.attempt.resuming, return_exceptions=True)
        prefilling, turn.attempt.prefilling = turn.attempt.prefilling, None  # its callbacks then ignore how it ends
        leaving = self._tasks.spawn(self._leave_decode(turn, turn_id))
        keeping = asyncio.create_task(self._keep_on_prefill(turn, turn_id))
        await asyncio.wait([leaving, keeping], timeout=FENCE_SECONDS)
        if not keeping.done():
            keeping.cancel()
        if prefilling is not None:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)
        for ring in turn.rings:
            if ring not in turn.recovery.earlier:
                turn.recovery.earlier.append(ring)
        return keeping.result() if keeping.done() and not keeping.cancelled() else None

    async def _leave_decode(self, turn: RunningTurn, turn_id: str) -> None:
        ring = turn.decode
        try:
            moved = TurnCancelled("the turn went to another ring")
            port = self._peers.leader("decode", ring.registration.endpoint)
            await ring.guarded(port.abort_turn(turn_id, moved))
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", ring.name, turn_id, error)
            ring.is_ready = False

    async def _keep_on_prefill(self, turn: RunningTurn, turn_id: str) -> KvLocation | None:
        """End the turn on its prefill ring, which retains the KV it has computed."""
        ring = turn.prefill
        if ring is None:
            return None
        port = self._peers.leader("prefill", ring.registration.endpoint)
        try:
            await ring.guarded(port.settle(turn.kv_id, turn_id, len(turn.token_ids)))
            retained = await ring.guarded(port.get_retained([turn.kv_id]))
        except RingserveError as error:
            if ring.is_ready:
                log.info("prefill ring %s could not be told to retain %s: %s", ring.name, turn.kv_id, error)
            ring.is_ready = False
            return None
        (num_tokens,), incarnation = retained.num_tokens, retained.incarnation
        if not num_tokens or incarnation != ring.registration.incarnation:
            return None
        # Only their number counts here, not how they lie over the ranks, which the ring does not tell.
        shards = ShardMap.of(((TokenRange(0, num_tokens),),))
        return KvLocation(ring=ring.name, incarnation=incarnation, shards=shards)

    # --- the attempt that follows ------------------------------------------------------------------------------------

    def _place(self, turn: RunningTurn, lost: LostTurn, made: KvLocation | None) -> None:
        """Choose rings for the next attempt and move the turn there, under a new id. Raises Unavailable.

        `made` is where KV lies that earlier attempts computed. For scores of the prompt, all of it is computed again.
        """
        first, request = turn.admitted.wanted, turn.request
        is_scored = request.sampling.prompt_logprobs is not None
        on_prefill = made or (first.prefill and first.prefill.cut(first.match_tokens))
        decoded = np.asarray(lost.token_ids[:-1], dtype=np.int64)
        num_tokens = len(turn.admitted.prompt) + len(decoded)
        wanted = WantedTurn(
            num_tokens=num_tokens,
            answer_tokens=request.sampling.max_tokens - len(decoded),
            match_tokens=0 if is_scored else num_tokens - 1,
            prefill=on_prefill,
            decode=first.decode and first.decode.cut(first.match_tokens),
            algorithm=turn.algorithm if turn.algorithm in RING_ALGORITHMS else None,
            shared={role: kv_id for role, kv_id in first.shared.items() if made is None or role != "prefill"},
        )
        choice = self._placer.choose(wanted)
        if turn.state is TurnState.LOST:
            turn.to(TurnState.RESERVING)
        turn.recovery.emitted, turn.stop_error = lost.token_ids, None
        attempt = Attempt(wanted, choice, self._placer.place(wanted, choice), decoded=decoded)
        self._turns.begin_again(turn, attempt)


def seconds_left(record: BegunRecord) -> float:
    """Return the seconds that a turn has left, by the system clock: the router that began it is gone.

    If the clock seems to have been set since then, return the turn's whole time. The gateway ends the turn at its
    client's deadline anyway.
    """
    seconds, passed = record.request.deadline_seconds, time.time() - record.begun_at
    return seconds - passed if 0 <= passed < seconds else seconds


def _reservation(ring: RegisteredRing, turn: TurnOnRing) -> Reservation:
    """Return a ring's reservation with what a turn needs of it that is planned already."""
    return Reservation(
        incarnation=ring.registration.incarnation,
        retained_tokens=turn.retained_tokens,
        shards=ShardMap.empty(ring.registration.num_ranks),
        kv_endpoints=(),
        tp=ring.registration.tp,
    )


def _is_answer_of(answer: BegunTurn, request: TurnRequest, lost: LostTurn) -> bool:
    """Return whether an answer is that of the lost turn, and not of an earlier request with the same id."""
    if lost.turn_id:
        return answer.turn_id == lost.turn_id
    assert answer.ended is not None, "an answer has ended"
    return answer.ended.seed == request.sampling.seed and lost.prompt_tokens in (0, answer.prompt_tokens)


def _without_scores(request: TurnRequest, lost: LostTurn) -> TurnRequest:
    """Drop the prompt's log-probabilities from the request if the client has tokens: it got them before."""
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=None)) if lost.token_ids else request


def _check(turn: RunningTurn) -> None:
    """Raise an error if the turn was ended meanwhile."""
    if isinstance(turn.stop_error, TurnCancelled):
        raise turn.stop_error
    if turn.is_over:
        raise TurnCancelled("the turn was ended while it was to go on")

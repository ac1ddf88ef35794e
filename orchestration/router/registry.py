"""Registry of the router's running turns, which ends each of them once and tells both rings how much KV to retain."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ringserve.cp_core.errors import LOSSES, RingserveError, TurnCancelled, Unavailable
from ringserve.orchestration.conversations.conversation import Conversation
from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.placement.kv_locations import Choice, KvLocations
from ringserve.orchestration.placement.registry import LoadShare, RegisteredRing, RingRegistry
from ringserve.orchestration.protocol.journal import BegunRecord, CommittedRecord, JournalPort, RingIncarnation
from ringserve.orchestration.protocol.plans import PromptMode
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import PrefillDone, TurnOutcome, tenant_of
from ringserve.orchestration.router.turn import (
    Attempt,
    EndedTurns,
    RunningTurn,
    TurnState,
    new_turn_id,
    on_decode_ring,
    on_prefill_ring,
)
from ringserve.orchestration.tasks import TaskSet, until_reached

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""Seconds past a turn's deadline after which the router ends the turn itself."""
FAILOVER_SECONDS = 10.0
"""Seconds that a turn which lost a ring waits for its gateway to begin it again."""
INTERRUPTED = (TurnState.PREFILLING, TurnState.DECODING, TurnState.RESUMING)
"""States of a turn that the loss of a ring interrupts."""
END_SECONDS = 1.0
"""Seconds that a client's last message waits for the prefill ring, which has nothing more to do for the turn."""


class TurnRegistry:
    """Registry of running turns by turn id and by request id. Ends turns exactly once, whatever ends them.

    `on_given_up` is called with each turn that is ended because nobody told of it, before that.
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

        The old id counts as ended: the rings that the turn leaves find nothing of it to end, and retain what the
        conversation had there.
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
        """Give a turn a new id: what its rings tell of the old one no longer counts. Return that."""
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
        """Hold a turn that lost its ring of a role, until its gateway begins it again."""
        turn.to(TurnState.LOST)
        turn.recovery.lost_role = role
        turn.attempt.load_share.end_prefill()
        self.lease(turn, FAILOVER_SECONDS)

    async def end(self, outcome: TurnOutcome) -> int:
        """End a turn. Return how many tokens its decode ring should retain. Idempotent.

        The answer is in the journal before; raises Unavailable if it cannot be written, and the turn goes on. A turn
        that lost a ring ends later, unless its gateway begins it again. If the prefill ring does not answer within
        END_SECONDS, the end goes on without the caller. The conversation takes its next turn after it.
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
            turn.ending.result()  # raises what a bug raised
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
        """Take notice of a loss. Return False if the turn ends by it, since it has not begun."""
        if turn.state is TurnState.RESERVING:
            if turn.recovery.lost_role:  # its next attempt is being begun, and is repeated
                turn.stop_error = Unavailable(f"ring {turn.decode.name} was lost before the turn went on")
            return bool(turn.recovery.lost_role)
        if turn.state is not TurnState.LOST:
            self.interrupt(turn, lost_role)
        return True

    async def abort(self, turn: RunningTurn, error: RingserveError) -> None:
        """End a turn where its client waits: on the decode ring's stream."""
        turn_id, is_lost = turn.turn_id, turn.state is TurnState.LOST
        turn.stop_error = error  # in case the ring does not know the turn yet
        if is_lost or not await self._told_decode(turn, error):
            await self.end(TurnOutcome(turn_id=turn_id, ok=False))

    async def fail(self, turn: RunningTurn, error: RingserveError) -> None:
        """End an attempt whose prefill failed. The client, who waits on the decode ring's stream, is told there."""
        turn_id = turn.turn_id
        await self._told_decode(turn, error)
        # If that ring did not know the turn any more, it has told no end.
        await self.end(TurnOutcome(turn_id=turn_id, ok=False, lost_role="prefill" if isinstance(error, LOSSES) else ""))

    async def drop(self, turn: RunningTurn, reason: RingserveError) -> None:
        """End a turn that failed before a client could wait on it."""
        turn_id = turn.turn_id
        await self._told_decode(turn, reason)
        await self.end(TurnOutcome(turn_id=turn_id, ok=False))

    def lose(self, ring: RegisteredRing, error: Unavailable) -> None:
        """Interrupt the turns that a lost ring was to decode; their gateways see it by themselves.

        A turn that is still being reserved, or prefilled on that ring, ends by its call to the ring, which fails.
        """
        for turn in list(self._running.values()):
            if turn.decode is ring and turn.state in INTERRUPTED:
                log.warning("turn %s is lost: %s", turn.turn_id, error)
                self.interrupt(turn, "decode")
                # A leader that only stood still would decode on.
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
        """End a turn whose gateway and decode leader are both gone: neither has reported its end."""
        if turn.ending is None:
            log.warning("no end of turn %s was reported; it is ended now", turn.turn_id)
            if turn.attempt.on_decode is not None:
                self.on_given_up(_record_of(turn), turn.admitted.conversation)
            self._start_ending(turn, TurnOutcome(turn_id=turn.turn_id, ok=False))

    def _start_ending(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        turn.to(TurnState.ENDING)
        if not outcome.ok:
            turn.give_up_prompt()
            self._journal.failed(turn.turn_id)  # nothing waits for it: the record of an ended turn does no harm
        answered = outcome.kv_tokens if turn.is_retained else 0
        turn.retain_tokens = answered if outcome.ok else turn.retained_on_decode
        turn.ending = asyncio.create_task(self._end(turn, outcome))

    async def _end(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        if turn.attempt.resuming is not None:  # reserves on the prefill ring, which is to be settled
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
        # The prompt and, after a preemption, the tokens decoded before it.
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
        """Leave the conversation as before the turn. KV that agreed with the turn's prompt is still there."""
        conversation = turn.admitted.conversation
        on_prefill, on_decode = turn.retained_on_prefill, turn.retained_on_decode
        await self._settle_prefill(turn, on_prefill)
        prefill, decode = conversation.prefill, conversation.decode
        # Rings that the turn did not reach, or left, still have what they had of the conversation.
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

        A ring that is lost, or has not answered after the control timeout, is told in the background, until the turn's
        lease ends.
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
        """Release KV of a turn's earlier attempts. Rings retain what the conversation has there."""
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
        """Release the conversation's KV on the rings that it has moved away from."""
        old = turn.admitted.conversation
        freed = Conversation(old.conversation_id)
        freed.places = KvLocations(
            prefill=old.prefill if old.prefill and turn.prefill and old.prefill.ring != turn.prefill.name else None,
            decode=old.decode if old.decode and old.decode.ring != turn.decode.name else None,
        )
        await self.free(freed)

    async def free(self, conversation: Conversation) -> None:
        """Release an idle conversation's KV on every ring. A ring that cannot be told has lost it anyway."""
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
    # Tokens that a new conversation shares with others are its own in the journal.
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

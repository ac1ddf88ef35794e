"""Registry of the router's running turns, which ends each of them once and tells both rings how much KV to retain."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from cp_core.errors import RingserveError, TurnCancelled
from orchestration.conversations.store import Conversation, ConversationStore, tenant_of
from orchestration.placement.kv_locations import Choice, KvLocation, KvLocations
from orchestration.placement.registry import LoadShare, RegisteredRing, RingRegistry
from orchestration.protocol.ports import Peers
from orchestration.protocol.turns import PrefillDone, TurnOutcome
from orchestration.router.turn import RunningTurn, TurnState, new_turn_id
from orchestration.tasks import TaskSet, until_reached

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Ended turns whose answer is remembered, so that telling an end twice is harmless."""
LEASE_SECONDS = 30.0
"""Seconds past a turn's deadline after which the router ends the turn itself."""
END_SECONDS = 1.0
"""Seconds that a client's last message waits for the prefill ring, which has nothing more to do for the turn."""


class TurnRegistry:
    """Registry of running turns by turn id and by request id. Ends turns exactly once, whatever ends them."""

    def __init__(
        self,
        peers: Peers,
        rings: RingRegistry,
        conversations: ConversationStore,
        tasks: TaskSet,
        control_timeout: float,
    ) -> None:
        self._peers = peers
        self._tasks = tasks
        self._rings = rings
        self._conversations = conversations
        self._control_timeout = control_timeout
        self._running: dict[str, RunningTurn] = {}
        self._turn_of_request: dict[str, str] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, turn: RunningTurn) -> None:
        """Enter a turn, count it to its rings, and start its lease."""
        delay = turn.request.deadline_seconds + LEASE_SECONDS
        turn.lease = asyncio.get_running_loop().call_later(delay, self._end_unreported, turn)
        self._enter(turn)

    def move(self, turn: RunningTurn, choice: Choice, load_share: LoadShare) -> str:
        """Move a turn to other rings under a new id. Return the old id, which counts as ended.

        So the rings that the turn leaves find nothing of it to end, and retain what the conversation had there.
        """
        before = turn.turn_id
        _count(turn, -1)
        turn.load_share.end_prefill()
        self._remember(before, turn.retained_on_decode)
        del self._running[before]
        turn.turn_id, turn.choice, turn.load_share = new_turn_id(), choice, load_share
        turn.on_prefill = turn.on_decode = None
        self._enter(turn)
        return before

    def take_prefill_ring(self, turn: RunningTurn, choice: Choice) -> None:
        """Give a prefill ring to a turn that had none."""
        _count(turn, -1)
        turn.choice = choice
        _count(turn, 1)

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

    async def end(self, outcome: TurnOutcome) -> int:
        """End a turn. Return how many tokens its decode ring should retain. Idempotent.

        Where the prefill ring does not answer within END_SECONDS, the end goes on without the caller. The conversation
        takes its next turn after it.
        """
        turn = self._running.get(outcome.turn_id)
        if turn is None:
            return self._ended.get(outcome.turn_id, 0)
        if turn.ending is None:
            self._start_ending(turn, outcome)
        assert turn.ending is not None, "just started"
        await asyncio.wait([turn.ending], timeout=END_SECONDS)
        if turn.ending.done():
            turn.ending.result()  # raises what a bug raised
        return turn.retain_tokens

    async def abort(self, turn: RunningTurn, error: RingserveError) -> None:
        """End a turn where its client waits: on the decode ring's stream."""
        turn.stop_error = error  # where the ring does not know the turn yet
        try:
            await self._abort_on_decode(turn, error)
        except RingserveError as failure:
            log.warning("decode ring %s could not be told to end %s: %s", turn.decode.name, turn.turn_id, failure)
            await self.end(TurnOutcome(turn_id=turn.turn_id, ok=False))

    async def drop(self, turn: RunningTurn, reason: RingserveError) -> None:
        """End a turn that failed before a client could wait on it."""
        try:
            await self._abort_on_decode(turn, reason)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", turn.decode.name, turn.turn_id, error)
        await self.end(TurnOutcome(turn_id=turn.turn_id, ok=False))

    async def _abort_on_decode(self, turn: RunningTurn, error: RingserveError) -> None:
        port = self._peers.leader("decode", turn.decode.registration.endpoint)
        await port.abort_turn(turn.turn_id, error)

    def _end_unreported(self, turn: RunningTurn) -> None:
        """End a turn whose gateway and decode leader are both gone: neither has reported its end."""
        if turn.ending is None:
            log.warning("no end of turn %s was reported; it is ended now", turn.turn_id)
            self._start_ending(turn, TurnOutcome(turn_id=turn.turn_id, ok=False))

    def _start_ending(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        turn.to(TurnState.ENDING)
        answered = outcome.kv_tokens if turn.is_retained else 0
        turn.retain_tokens = answered if outcome.ok else turn.retained_on_decode
        turn.ending = asyncio.create_task(self._end(turn, outcome))

    async def _end(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        if turn.resuming is not None:  # reserves on the prefill ring, which is to be settled
            await asyncio.gather(turn.resuming, return_exceptions=True)
        try:
            await (self._finish(turn, outcome) if outcome.ok else self._roll_back(turn))
        finally:
            self._remove(turn)

    async def _finish(self, turn: RunningTurn, outcome: TurnOutcome) -> None:
        conversation = turn.conversation
        assert turn.prefilling and turn.on_decode, "a finished turn was prefilled"
        done: PrefillDone | None = None
        try:
            async with asyncio.timeout(self._control_timeout):
                done = await asyncio.shield(turn.prefilling)
        except (RingserveError, TimeoutError) as error:
            log.warning("ring %s lost the KV of %s: %s", turn.choice.computing.name, turn.kv_id, error)
        # The prompt and, after a preemption, the tokens decoded before it.
        await self._settle_prefill(turn, done.shards.num_tokens if done and turn.is_retained else 0)
        if not turn.is_retained:
            return
        await self._leave_other_rings(turn)
        conversation.tokens = np.concatenate([turn.prompt, np.asarray(outcome.token_ids, dtype=np.int64)])
        conversation.num_turns += 1
        conversation.places = conversation.places.changed(
            prefill=_on_prefill_ring(turn, done),
            decode=KvLocation(ring=turn.decode.name, incarnation=turn.on_decode.incarnation, shards=outcome.shards),
        )

    async def _roll_back(self, turn: RunningTurn) -> None:
        """Leave the conversation as before the turn. KV that agreed with the turn's prompt is still there."""
        conversation = turn.conversation
        on_prefill, on_decode = turn.retained_on_prefill, turn.retained_on_decode
        await self._settle_prefill(turn, on_prefill)
        prefill, decode = conversation.prefill, conversation.decode
        # Rings that the turn did not reach, or left, still have what they had of the conversation.
        reached = {ring.name for ring in turn.rings}
        conversation.places = conversation.places.changed(
            prefill=prefill.cut(on_prefill) if prefill and prefill.ring in reached else prefill,
            decode=decode.cut(on_decode) if decode and decode.ring in reached else decode,
        )

    async def _settle_prefill(self, turn: RunningTurn, retain_tokens: int) -> None:
        """Settle the prefill ring, if the turn has one, and stop waiting for the prefill's answer.

        A ring that has not answered after the control timeout is told in the background, until its own lease ends.
        """
        if turn.prefill is not None:
            settling = self._tasks.spawn(self._settle(turn, turn.prefill, retain_tokens))
            await asyncio.wait([settling], timeout=self._control_timeout)
        if turn.prefilling is not None:
            turn.prefilling.cancel()
            await asyncio.gather(turn.prefilling, return_exceptions=True)

    async def _settle(self, turn: RunningTurn, ring: RegisteredRing, retain_tokens: int) -> None:
        port, turn_id = self._peers.leader("prefill", ring.registration.endpoint), turn.turn_id
        is_computing = turn.prefilling is not None and not turn.prefilling.done()

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
        turn.load_share.end_prefill()
        self._conversations.close(turn.conversation)
        self._remember(turn.turn_id, turn.retain_tokens)

    def _remember(self, turn_id: str, retain: int) -> None:
        self._ended[turn_id] = retain
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    async def _leave_other_rings(self, turn: RunningTurn) -> None:
        """Release the conversation's KV on the rings that it has moved away from."""
        old = turn.conversation
        left = KvLocations(
            prefill=old.prefill if old.prefill and turn.prefill and old.prefill.ring != turn.prefill.name else None,
            decode=old.decode if old.decode and old.decode.ring != turn.decode.name else None,
        )
        await self.free(Conversation(old.conversation_id, places=left))

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


def _count(turn: RunningTurn, change: int) -> None:
    """Add a turn to the counts of its rings, or take it out."""
    for ring in turn.rings:
        ring.num_turns += change


def _on_prefill_ring(turn: RunningTurn, done: PrefillDone | None) -> KvLocation | None:
    """Return what a prefill ring retains of the conversation when the turn is over.

    A ring that the turn did without lags behind. Where the turn has changed the history, the ring's KV beyond the
    common prefix no longer counts.
    """
    if turn.prefill is None:
        before = turn.conversation.prefill
        return None if before is None else before.cut(turn.match_tokens)
    if done is None:
        return None
    assert turn.on_prefill, "what was prefilled there was reserved before"
    return KvLocation(ring=turn.prefill.name, incarnation=turn.on_prefill.incarnation, shards=done.shards)

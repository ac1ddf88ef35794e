"""How turns end: entered once, whoever tells it and however often, with both rings told what to keep."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from cp_core.errors import RingserveError, TurnCancelled
from orchestration.conversations.store import Conversation, ConversationStore, tenant_of
from orchestration.placement.kv_locations import KvLocation, KvLocations
from orchestration.placement.registry import LoadShare, RingRegistry
from orchestration.placement.wanted_turn import Choice
from orchestration.protocol.ports import Peers, RingPort
from orchestration.protocol.turns import PrefillDone, TurnOutcome
from orchestration.router.turn import RunningTurn, new_turn_id

log = logging.getLogger(__name__)

MAX_REMEMBERED = 4096
"""Ended turns whose answer is kept, so that telling an end twice is harmless."""
LEASE_SECONDS = 30.0
"""How long past its deadline a turn is waited for."""


class TurnRegistry:
    """The running turns by id and by request, and the way out for each of them."""

    def __init__(
        self, peers: Peers, rings: RingRegistry, conversations: ConversationStore, control_timeout: float
    ) -> None:
        self._peers = peers
        self._rings = rings
        self._conversations = conversations
        self._control_timeout = control_timeout
        self._running: dict[str, RunningTurn] = {}
        self._turn_of_request: dict[str, str] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, turn: RunningTurn) -> None:
        delay = turn.request.deadline_seconds + LEASE_SECONDS
        turn.lease = asyncio.get_running_loop().call_later(delay, self._lease_ended, turn)
        self._running[turn.turn_id] = turn
        self._turn_of_request[turn.request.request_id] = turn.turn_id
        _count(turn, 1)

    def move(self, turn: RunningTurn, choice: Choice, placed: LoadShare) -> str:
        """The turn goes to other rings, by another id: returns the one before, which counts as ended.

        So the rings that are left find nothing of it to end, and keep what the conversation had there.
        """
        before = turn.turn_id
        _count(turn, -1)
        turn.placed.end_prefill()
        self._remember(before, turn.retained_on_decode)
        del self._running[before]
        turn.turn_id, turn.choice, turn.placed = new_turn_id(), choice, placed
        turn.on_prefill = turn.on_decode = None
        self._running[turn.turn_id] = turn
        self._turn_of_request[turn.request.request_id] = turn.turn_id
        _count(turn, 1)
        return before

    def take_prefill_ring(self, turn: RunningTurn, choice: Choice) -> None:
        """A turn that had no prefill ring gets one."""
        _count(turn, -1)
        turn.choice = choice
        _count(turn, 1)

    def of_tenant(self, tenant: str) -> Iterator[RunningTurn]:
        """Running turns whose request id is `tenant/...`."""
        return (turn for turn in self._running.values() if tenant_of(turn.request.request_id) == tenant)

    def of_request(self, request_id: str) -> RunningTurn | None:
        return self._running.get(self._turn_of_request.get(request_id, ""))

    def of_turn(self, turn_id: str) -> RunningTurn | None:
        return self._running.get(turn_id)

    async def end(self, outcome: TurnOutcome) -> int:
        """Enter what a turn came to. Returns how many tokens its decode ring should keep. Idempotent."""
        turn = self._running.get(outcome.turn_id)
        if turn is None:
            return self._ended.get(outcome.turn_id, 0)
        if turn.ending is None:
            turn.ending = asyncio.create_task(self._end(turn, outcome))
        return await asyncio.shield(turn.ending)

    async def abort(self, turn: RunningTurn, error: RingserveError) -> None:
        """End a turn from here: where its client waits, on the decode ring's stream."""
        turn.stop_error = error  # where the ring does not know the turn yet
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, error)
        except RingserveError as failure:
            log.warning("decode ring %s could not be told to end %s: %s", turn.decode.name, turn.turn_id, failure)
            await self.end(TurnOutcome(turn_id=turn.turn_id, ok=False))

    async def give_up(self, turn: RunningTurn, reason: RingserveError) -> None:
        """The turn failed before a client could wait on it."""
        try:
            await self._decode_port(turn).abort_turn(turn.turn_id, reason)
        except RingserveError as error:
            log.info("decode ring %s could not be told to drop %s: %s", turn.decode.name, turn.turn_id, error)
        await self.end(TurnOutcome(turn_id=turn.turn_id, ok=False))

    def _lease_ended(self, turn: RunningTurn) -> None:
        """Both who could have told the end are gone: the gateway, and the decode leader that watched the deadline."""
        if turn.ending is None:
            log.warning("nobody told the end of turn %s; it is ended now", turn.turn_id)
            turn.ending = asyncio.create_task(self._end(turn, TurnOutcome(turn_id=turn.turn_id, ok=False)))

    async def _end(self, turn: RunningTurn, outcome: TurnOutcome) -> int:
        keep = 0
        if turn.resuming is not None:  # reserves on the prefill ring, which is to be settled
            await asyncio.gather(turn.resuming, return_exceptions=True)
        try:
            keep = await (self._finish(turn, outcome) if outcome.ok else self._roll_back(turn))
        finally:
            self._close(turn, keep)
        return keep

    async def _finish(self, turn: RunningTurn, outcome: TurnOutcome) -> int:
        conversation = turn.conversation
        assert turn.prefilling and turn.on_decode, "a finished turn was prefilled"
        done: PrefillDone | None = None
        try:
            async with asyncio.timeout(self._control_timeout):
                done = await asyncio.shield(turn.prefilling)
        except (RingserveError, TimeoutError) as error:
            log.warning("ring %s lost the KV of %s: %s", turn.choice.computing.name, turn.kv_id, error)
        # The prompt and, after a preemption, what had been decoded before.
        await self._settle_prefill(turn, done.shards.num_tokens if done and turn.is_retained else 0)
        if not turn.is_retained:
            return 0
        await self._leave_other_rings(turn)
        conversation.tokens = np.concatenate([turn.prompt, np.asarray(outcome.token_ids, dtype=np.int64)])
        conversation.num_turns += 1
        conversation.places = conversation.places.changed(
            prefill=_on_prefill_ring(turn, done),
            decode=KvLocation(ring=turn.decode.name, incarnation=turn.on_decode.incarnation, shards=outcome.shards),
        )
        return outcome.kv_tokens

    async def _roll_back(self, turn: RunningTurn) -> int:
        """The conversation is as before the turn; of its KV, what agreed with the turn's prompt is still there."""
        conversation = turn.conversation
        retained_on_prefill, retained_on_decode = turn.retained_on_prefill, turn.retained_on_decode
        await self._settle_prefill(turn, retained_on_prefill)
        prefill, decode = conversation.prefill, conversation.decode
        # Rings that the turn did not come to, or left, still have what they had of it.
        came_to = {ring.name for ring in turn.rings}
        conversation.places = conversation.places.changed(
            prefill=prefill.cut(retained_on_prefill) if prefill and prefill.ring in came_to else prefill,
            decode=decode.cut(retained_on_decode) if decode and decode.ring in came_to else decode,
        )
        return retained_on_decode

    async def _settle_prefill(self, turn: RunningTurn, retain_tokens: int) -> None:
        """Without a prefill ring there is only the decode ring's word to wait for no longer."""
        if turn.prefill is not None:
            port = self._peers.leader("prefill", turn.prefill.registration.endpoint)
            try:
                if turn.prefilling is not None and not turn.prefilling.done():
                    await port.abort_turn(turn.turn_id, TurnCancelled("the turn ended"))
                await port.settle(turn.kv_id, turn.turn_id, retain_tokens)
            except RingserveError as error:
                log.warning("prefill ring %s could not settle %s: %s", turn.prefill.name, turn.turn_id, error)
        if turn.prefilling is not None:
            turn.prefilling.cancel()
            await asyncio.gather(turn.prefilling, return_exceptions=True)

    def _decode_port(self, turn: RunningTurn) -> RingPort:
        return self._peers.leader("decode", turn.decode.registration.endpoint)

    def _close(self, turn: RunningTurn, keep: int) -> None:
        if turn.lease is not None:
            turn.lease.cancel()
        del self._running[turn.turn_id]
        del self._turn_of_request[turn.request.request_id]
        _count(turn, -1)
        turn.placed.end_prefill()
        self._conversations.close(turn.conversation)
        self._remember(turn.turn_id, keep)

    def _remember(self, turn_id: str, keep: int) -> None:
        self._ended[turn_id] = keep
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    async def _leave_other_rings(self, turn: RunningTurn) -> None:
        """Where the conversation has moved, its KV on the rings it came from is of no more use."""
        old = turn.conversation
        left = KvLocations(
            prefill=old.prefill if old.prefill and turn.prefill and old.prefill.ring != turn.prefill.name else None,
            decode=old.decode if old.decode and old.decode.ring != turn.decode.name else None,
        )
        await self.free(Conversation(old.conversation_id, places=left))

    async def free(self, conversation: Conversation) -> None:
        """Free an idle conversation's KV wherever it lies. A ring that cannot be told has lost it anyway."""
        for role, placement in conversation.places.items():
            ring = self._rings.named(role, placement.ring)
            if ring is None:
                continue
            port = self._peers.leader(role, ring.registration.endpoint)
            try:
                await port.settle(conversation.conversation_id, "", 0)
            except RingserveError as error:
                log.warning("ring %s could not free %s: %s", ring.name, conversation.conversation_id, error)


def _count(turn: RunningTurn, change: int) -> None:
    """Enter a turn with its rings, or take it out."""
    for ring in turn.rings:
        ring.num_turns += change


def _on_prefill_ring(turn: RunningTurn, done: PrefillDone | None) -> KvLocation | None:
    """What a prefill ring keeps of the conversation when the turn is over.

    One that the turn did without lags behind; and where the turn has changed the history, what the ring has beyond the
    common beginning counts no longer.
    """
    if turn.prefill is None:
        before = turn.conversation.prefill
        return None if before is None else before.cut(turn.match_tokens)
    if done is None:
        return None
    assert turn.on_prefill, "what was prefilled there was reserved before"
    return KvLocation(ring=turn.prefill.name, incarnation=turn.on_prefill.incarnation, shards=done.shards)

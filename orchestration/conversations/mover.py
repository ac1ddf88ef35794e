"""Moves the kept KV of an idle conversation from one ring of a role to another: copied, entered, then freed.

The books change when the target has it whole; until then the conversation is where it was, whatever fails. Turns that
come meanwhile wait for the move, which its deadline ends.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from cp_core.errors import RingserveError, Unavailable
from orchestration.conversations.move_counts import MoveCounts
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.kv_locations import KvLocation
from orchestration.placement.registry import RegisteredRing
from orchestration.protocol.kv import TakeKv, TakenKv
from orchestration.protocol.ports import Peers, RingPort
from orchestration.protocol.views import MoveReason

log = logging.getLogger(__name__)


class ConversationMover:
    """`counts` learns of every move. Times in seconds: `transfer_timeout` is for the bytes of one move."""

    def __init__(
        self,
        store: ConversationStore,
        peers: Peers,
        counts: MoveCounts,
        *,
        control_timeout: float,
        transfer_timeout: float,
    ) -> None:
        self._store = store
        self._peers = peers
        self._counts = counts
        self._control_timeout = control_timeout
        self._transfer_timeout = transfer_timeout

    async def retained_on(self, ring: RegisteredRing, conversations: list[Conversation]) -> list[int]:
        """How many tokens of each a ring keeps of what the books say. Raises Unavailable."""
        port = self._port(ring)
        try:
            async with asyncio.timeout(self._control_timeout):
                kept = await port.get_retained([each.conversation_id for each in conversations])
        except TimeoutError:
            raise Unavailable(f"ring {ring.name} did not say what it keeps") from None
        counts = []
        for conversation, num_tokens in zip(conversations, kept.num_tokens, strict=True):
            place = conversation.places.at(ring.role)
            is_there = place and (place.ring, place.incarnation) == (ring.name, kept.incarnation)
            counts.append(min(num_tokens, place.num_tokens) if place and is_there else 0)
        return counts

    async def move(
        self,
        conversation: Conversation,
        source: RegisteredRing,
        target: RegisteredRing,
        num_tokens: int,
        reason: MoveReason,
    ) -> TakenKv:
        """Move a conversation that can be moved. Raises CapacityExceeded where the target has no room, and what else
        kept either ring from it.
        """
        self._store.begin_move(conversation)
        try:
            taken = await self._copy(conversation.conversation_id, source, target, num_tokens)
            place = KvLocation(ring=target.name, incarnation=taken.incarnation, shards=taken.shards)
            conversation.places = conversation.places.put(source.role, place)
            target.spare_tokens = max(0, target.spare_tokens - num_tokens)
            await self._free(conversation.conversation_id, source)
        finally:
            self._store.end_move(conversation)
        self._counts.moved(source.role, reason, taken.payload_bytes, taken.seconds)
        log.info(
            "%d tokens of %s went from ring %s to %s in %.3f s (%s)",
            num_tokens,
            conversation.conversation_id,
            source.name,
            target.name,
            taken.seconds,
            reason,
        )
        return taken

    async def _copy(self, kv_id: str, source: RegisteredRing, target: RegisteredRing, num_tokens: int) -> TakenKv:
        ring = source.registration
        request = TakeKv(
            transfer_id=f"move-{uuid.uuid4().hex[:16]}",
            attempt=1,
            kv_id=kv_id,
            num_tokens=num_tokens,
            source_role=ring.role,
            source_endpoint=ring.endpoint,
            source_incarnation=ring.incarnation,
            deadline_seconds=self._transfer_timeout,
        )
        try:
            return await self._port(target).take_kv(request)
        except Unavailable:
            # Perhaps only the answer was lost: asked again, the ring joins the move, or answers as before.
            return await self._port(target).take_kv(request)

    async def _free(self, kv_id: str, source: RegisteredRing) -> None:
        """What stays behind is evicted sooner or later."""
        try:
            async with asyncio.timeout(self._control_timeout):
                await self._port(source).settle(kv_id, "", 0)
        except (RingserveError, TimeoutError) as error:
            log.warning("ring %s could not free %s, which has moved: %s", source.name, kv_id, error)

    def _port(self, ring: RegisteredRing) -> RingPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)

"""Move of an idle conversation's retained KV from one ring to another of the same role, for rebalancing.

The target copies the KV, the store enters its new place, then the source releases its copy. The store is changed only
after the target holds all of the KV. Until then it still names the source, whatever fails. Turns that arrive meanwhile
wait for the move, which has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass

from ringserve.cp_core.errors import RingserveError, Unavailable
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import KvLocation
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.orchestration.protocol.ports import Peers, PrefillPort
from ringserve.orchestration.protocol.turns import TakeKv, TakenKv
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.views import KvMoves

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Count:
    num_moved: int = 0
    num_failed: int = 0
    payload_bytes: int = 0
    seconds: float = 0.0


class MoveCounts:
    """Counts of moves since the router started, by the role of the two rings and by reason."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, MoveReason], _Count] = {}

    def moved(self, role: str, reason: MoveReason, payload_bytes: int, seconds: float) -> None:
        """Count a move."""
        count = self._of(role, reason)
        count.num_moved += 1
        count.payload_bytes += payload_bytes
        count.seconds += seconds

    def failed(self, role: str, reason: MoveReason) -> None:
        """Count a move that failed."""
        self._of(role, reason).num_failed += 1

    def totals(self) -> tuple[KvMoves, ...]:
        """Return the counts that are not zero."""
        return tuple(
            KvMoves(
                role=role,
                reason=reason,
                moved=count.num_moved,
                failed=count.num_failed,
                payload_bytes=count.payload_bytes,
                seconds=count.seconds,
            )
            for (role, reason), count in sorted(self._counts.items())
        )

    def _of(self, role: str, reason: MoveReason) -> _Count:
        return self._counts.setdefault((role, reason), _Count())


class ConversationMover:
    """Mover of retained KV. It counts the moves that succeed in `counts`; its callers count those that fail.

    Timeouts are in seconds. `transfer_timeout` is the deadline for the transfer of one move's KV.
    """

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
        """Return, for each conversation, how many tokens the ring still retains at the place that the store has.

        That is 0 if the place is on another ring or of another incarnation. Raises Unavailable.
        """
        port = self._port(ring)
        try:
            async with asyncio.timeout(self._control_timeout):
                retained = await port.get_retained([each.conversation_id for each in conversations])
        except TimeoutError:
            raise Unavailable(f"ring {ring.name} did not say what it retains") from None
        counts = []
        for conversation, num_tokens in zip(conversations, retained.num_tokens, strict=True):
            place = conversation.places.at(ring.role)
            is_there = place and (place.ring, place.incarnation) == (ring.name, retained.incarnation)
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
        """Move a conversation for which `ConversationStore.can_move` is true.

        Raises CapacityExceeded if the target is full, and the errors of calls to rings.
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
            # Perhaps only the answer was lost. If the ring is asked again, it joins the move that is under way, or
            # repeats its answer.
            return await self._port(target).take_kv(request)

    async def _free(self, kv_id: str, source: RegisteredRing) -> None:
        """Release the source's copy. If that fails, the ring evicts the copy sooner or later."""
        try:
            async with asyncio.timeout(self._control_timeout):
                await self._port(source).settle(kv_id, "", retain_tokens=0)
        except (RingserveError, TimeoutError) as error:
            log.warning("ring %s could not free %s, which has moved: %s", source.name, kv_id, error)

    def _port(self, ring: RegisteredRing) -> PrefillPort:
        return self._peers.leader(ring.role, ring.registration.endpoint)

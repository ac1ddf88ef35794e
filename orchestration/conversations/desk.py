"""What can be asked about conversations: where one is, which there are, to fork one, to forget one.

The router's books say where KV was put; rings may have evicted it since. So whatever is shown is asked from the rings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cp_core.errors import Busy, InvalidRequest, NotFound, RingserveError
from orchestration.conversations.quotas import RunningTurns
from orchestration.conversations.store import Conversation, ConversationStore
from orchestration.placement.kv_locations import KvLocation
from orchestration.placement.registry import RingRegistry
from orchestration.protocol.kv import ForkKv, RetainedKv
from orchestration.protocol.ports import Peers
from orchestration.protocol.views import ConversationList, ConversationSummary, ConversationView, KvLocationView

log = logging.getLogger(__name__)

MAX_PAGE = 1000
RingName = tuple[str, str]
"""(role, ring)."""


class ConversationDesk:
    """Answers for the store's conversations. `turns` knows the running ones and frees KV."""

    def __init__(self, store: ConversationStore, peers: Peers, rings: RingRegistry, turns: RunningTurns) -> None:
        self._store = store
        self._peers = peers
        self._rings = rings
        self._turns = turns

    async def get(self, conversation_id: str) -> ConversationView:
        """Raises NotFound."""
        conversation = self._store.get(conversation_id)
        return self._view(conversation, await self._kept([conversation]))

    async def list(self, prefix: str, after: str, limit: int) -> ConversationList:
        """At most `limit` conversations by id, from behind `after` on. Raises InvalidRequest."""
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequest(f"page_size: {limit} is out of range; allowed are 1 to {MAX_PAGE}")
        conversations, next_after = self._store.page(prefix, after, limit)
        kept = await self._kept(conversations)
        views = [self._view(conversation, kept) for conversation in conversations]
        return ConversationList(conversations=tuple(map(_summary, views)), next_after=next_after)

    async def delete(self, conversation_id: str) -> None:
        """Forget a conversation and free its KV; forks of it keep theirs. Raises NotFound, Busy."""
        await self._store.until_moved(conversation_id)
        await self._turns.free(self._store.remove(conversation_id))

    async def fork(self, source_id: str, new_id: str, at_token: int | None) -> ConversationView:
        """A conversation that begins with the source's finished turns, or with its first `at_token` tokens.

        On each ring both share what is kept of them; a ring that cannot fork leaves it to be pulled or computed.
        Asking again for a fork that nobody has used is answered as before. Raises NotFound, InvalidRequest, Busy.
        """
        await self._store.until_moved(source_id)
        source = self._store.get(source_id)
        if source.tokens is None:
            raise NotFound(f"source_id: conversation {source_id!r} has finished no turn yet")
        total = len(source.tokens)
        num_tokens = total if at_token is None else at_token
        if not 1 <= num_tokens <= total:
            raise InvalidRequest(f"at_token: {num_tokens} is out of range; allowed are 1 to {total}")
        known = self._store.fork_of(source_id, new_id, num_tokens)
        if known is not None:
            if known.num_forks:
                raise Busy(f"new_id: conversation {new_id!r} is being forked; retry in a moment")
            return await self.get(new_id)
        shared = min(num_tokens, self._num_agreeing(source))
        fork, dropped = self._store.begin_fork(source, new_id, num_tokens)
        is_forked = False
        try:
            on_prefill, on_decode, *_ = await asyncio.gather(
                self._fork_on("prefill", source.prefill, source_id, new_id, shared),
                self._fork_on("decode", source.decode, source_id, new_id, shared),
                *(self._turns.free(old) for old in dropped),
            )
            fork.places = fork.places.changed(prefill=on_prefill, decode=on_decode)
            is_forked = True
        finally:
            self._store.end_fork(source, fork)
            if not is_forked and fork.is_idle:
                self._store.remove(new_id)
        return fork.view(self._store.clock())

    async def _fork_on(
        self, role: str, placement: KvLocation | None, source_id: str, new_id: str, num_tokens: int
    ) -> KvLocation | None:
        ring = self._rings.named(role, placement.ring) if placement and num_tokens else None
        if placement is None or ring is None:
            return None
        request = ForkKv(source_id=source_id, kv_id=new_id, num_tokens=min(num_tokens, placement.num_tokens))
        try:
            forked = await self._peers.leader(role, ring.registration.endpoint).fork_kv(request)
        except RingserveError as error:
            log.info("%s ring %s keeps nothing of fork %s: %s", role, ring.name, new_id, error)
            return None
        if forked.incarnation != placement.incarnation or not forked.shards.num_tokens:
            return None
        return KvLocation(ring=ring.name, incarnation=forked.incarnation, shards=forked.shards)

    def _num_agreeing(self, conversation: Conversation) -> int:
        """Tokens of its finished turns that its KV on the rings agrees with: a running turn may have changed others."""
        if not conversation.running_request:
            return 0 if conversation.tokens is None else len(conversation.tokens)
        turn = self._turns.of_request(conversation.running_request)
        return 0 if turn is None else turn.match_tokens

    async def _kept(self, conversations: Sequence[Conversation]) -> Mapping[RingName, Mapping[str, tuple[str, int]]]:
        """By ring, what it says it keeps of each conversation: (its incarnation, tokens)."""
        asked: dict[RingName, list[str]] = {}
        for conversation in conversations:
            for role, placement in conversation.places.items():
                asked.setdefault((role, placement.ring), []).append(conversation.conversation_id)
        answers = await asyncio.gather(*(self._ask(ring, names) for ring, names in asked.items()))
        return {
            ring: {name: (kept.incarnation, count) for name, count in zip(names, kept.num_tokens, strict=True)}
            for (ring, names), kept in zip(asked.items(), answers, strict=True)
            if kept is not None
        }

    async def _ask(self, key: RingName, conversation_ids: Sequence[str]) -> RetainedKv | None:
        role, name = key
        ring = self._rings.named(role, name)
        if ring is None or not ring.is_ready:
            return None
        try:
            return await self._peers.leader(role, ring.registration.endpoint).get_retained(conversation_ids)
        except RingserveError as error:
            log.info("%s ring %s cannot say what it keeps: %s", role, name, error)
            return None

    def _view(
        self, conversation: Conversation, kept: Mapping[RingName, Mapping[str, tuple[str, int]]]
    ) -> ConversationView:
        """With the placements that are still true. Of a ring that does not answer nothing is claimed."""
        view = conversation.view(self._store.clock())
        limit = self._num_agreeing(conversation)

        def still_there(places: Iterable[KvLocationView]) -> Iterable[KvLocationView]:
            for place in places:
                said = kept.get((place.role, place.ring), {})
                incarnation, count = said.get(conversation.conversation_id, ("", 0))
                shards = place.shards.truncate(min(count, limit))
                if incarnation == place.incarnation and shards.num_tokens:
                    yield replace(place, num_tokens=shards.num_tokens, shards=shards)

        return replace(view, placements=tuple(still_there(view.placements)))


def _summary(view: ConversationView) -> ConversationSummary:
    return ConversationSummary(
        conversation_id=view.conversation_id,
        num_tokens=view.num_tokens,
        num_turns=view.num_turns,
        running_request_id=view.running_request_id,
        idle_seconds=view.idle_seconds,
        ttl_seconds=view.ttl_seconds,
        num_waiting=view.num_waiting,
        kept_on_prefill=view.retained_on("prefill"),
        kept_on_decode=view.retained_on("decode"),
    )

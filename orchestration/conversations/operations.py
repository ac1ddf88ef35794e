"""Operations on conversations that clients ask for: show, list, fork and delete; and the expiry of conversations.

The store says where KV was put; rings may have evicted it since. So before KV is shown, the rings are asked what they
still retain. The router and its admission of turns call this.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ringserve.cp_core.errors import Busy, InvalidRequest, NotFound, RingserveError
from ringserve.orchestration.conversations.quotas import KvQuotas, RunningTurnsPort
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import KvLocation
from ringserve.orchestration.placement.registry import RingRegistry
from ringserve.orchestration.protocol.ports import Peers
from ringserve.orchestration.protocol.turns import ForkKv, KvQuota, RetainedKv
from ringserve.orchestration.tasks import TaskSet
from ringserve.views import ConversationInfo, ConversationPage, ConversationSummary

log = logging.getLogger(__name__)

EXPIRY_INTERVAL = 1.0
"""Seconds between two looks for expired conversations, so a conversation may be forgotten this much too late."""
MAX_PAGE = 1000
"""Most conversations on one page."""
RingName = tuple[str, str]
"""(role, ring)."""
Retained = Mapping[RingName, Mapping[str, tuple[str, int]]]
"""By ring and conversation id: (incarnation of the ring, retained tokens), as the rings say."""


class ConversationOperations:
    """Operations on the store's conversations. `turns` knows the running turns and releases KV."""

    def __init__(
        self, store: ConversationStore, peers: Peers, rings: RingRegistry, turns: RunningTurnsPort, tasks: TaskSet
    ) -> None:
        self._store = store
        self._peers = peers
        self._rings = rings
        self._turns = turns
        self._quotas = KvQuotas(store, turns)
        self._tasks = tasks
        self._expiring: asyncio.Task[None] | None = None

    async def get(self, conversation_id: str) -> ConversationInfo:
        """Show a conversation. Raises NotFound."""
        self.expire()
        conversation = self._store.get(conversation_id)
        return _with_last(self._view(conversation, await self._retained([conversation])), conversation)

    async def list(self, prefix: str, after: str, limit: int) -> ConversationPage:
        """Return at most `limit` conversations in order of id, from the first after `after`. Raises InvalidRequest."""
        self.expire()
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequest(f"page_size: {limit} is out of range; allowed are 1 to {MAX_PAGE}")
        conversations, next_after = self._store.page(prefix, after, limit)
        retained = await self._retained(conversations)
        views = [self._view(conversation, retained) for conversation in conversations]
        return ConversationPage(conversations=tuple(map(_summary, views)), next_page_token=next_after)

    async def delete(self, conversation_id: str) -> None:
        """Forget a conversation and release its KV; forks of it retain theirs. Raises NotFound, Busy, Unavailable."""
        self.expire()
        await self._store.until_moved(conversation_id)
        await self._turns.free(await self._store.delete(conversation_id))

    # --- forks -------------------------------------------------------------------------------------------------------

    async def fork(
        self, source_id: str, new_id: str, at_token: int | None, kv_quota: KvQuota | None = None
    ) -> ConversationInfo:
        """Begin a conversation with the source's finished turns, or with its first `at_token` tokens.

        On each ring the fork shares the KV that the ring retains of the source. If a ring cannot fork, the fork has no
        KV there: its next turn pulls the KV or computes it again. If the request is repeated before a turn uses the
        fork, the same fork is returned. The fork's KV counts against `kv_quota`. Raises NotFound, InvalidRequest, Busy,
        CapacityExceeded.
        """
        self.expire()
        await self._store.until_moved(source_id)
        source = self._store.get(source_id)
        if not source.has_finished:
            raise NotFound(f"source_id: conversation {source_id!r} has finished no turn yet")
        total = source.num_tokens
        num_tokens = total if at_token is None else at_token
        if not 1 <= num_tokens <= total:
            raise InvalidRequest(f"at_token: {num_tokens} is out of range; allowed are 1 to {total}")
        known = self._store.fork_of(source_id, new_id, num_tokens)
        if known is not None:
            if known.num_forks:
                raise Busy(f"new_id: conversation {new_id!r} is being forked; retry in a moment")
            return await self.get(new_id)
        shared = min(num_tokens, self.num_agreeing(source))
        over_quota = []
        if kv_quota is not None:
            over_quota = self._quotas.admit_fork(kv_quota, source, min(shared, source.kv_tokens))
        fork, dropped = self._store.begin_fork(source, new_id, num_tokens)
        is_forked = False
        try:
            on_prefill, on_decode, *_ = await asyncio.gather(
                self._fork_on("prefill", source.prefill, source_id, new_id, shared),
                self._fork_on("decode", source.decode, source_id, new_id, shared),
                *(self._turns.free(old) for old in (*over_quota, *dropped)),
            )
            fork.places = fork.places.changed(prefill=on_prefill, decode=on_decode)
            await self._store.note_fork(fork)
            is_forked = True
        finally:
            self._store.end_fork(source, fork)
            if not is_forked and fork.is_idle:
                self._store.remove(new_id)
        return _with_last(fork.view(self._store.clock()), fork)

    async def _fork_on(
        self, role: str, place: KvLocation | None, source_id: str, new_id: str, num_tokens: int
    ) -> KvLocation | None:
        ring = self._rings.named(role, place.ring) if place and num_tokens else None
        if place is None or ring is None:
            return None
        request = ForkKv(source_id=source_id, kv_id=new_id, num_tokens=min(num_tokens, place.num_tokens))
        try:
            forked = await self._peers.leader(role, ring.registration.endpoint).fork_kv(request)
        except RingserveError as error:
            log.info("%s ring %s retains nothing of fork %s: %s", role, ring.name, new_id, error)
            return None
        if forked.incarnation != place.incarnation or not forked.shards.num_tokens:
            return None
        return KvLocation(ring=ring.name, incarnation=forked.incarnation, shards=forked.shards)

    # --- views -------------------------------------------------------------------------------------------------------

    def num_agreeing(self, conversation: Conversation) -> int:
        """Return how many leading tokens of the finished turns agree with the KV on the rings.

        A running turn may have replaced the KV of the tokens after them.
        """
        if not conversation.running_request:
            return conversation.num_tokens
        turn = self._turns.of_request(conversation.running_request)
        return 0 if turn is None else turn.match_tokens

    def num_shareable(self, conversation: Conversation) -> int:
        """Return how many tokens other histories may share: `num_agreeing`, but 0 if the KV is approximate."""
        return 0 if conversation.sparsity is not None else self.num_agreeing(conversation)

    async def _retained(self, conversations: Sequence[Conversation]) -> Retained:
        """Ask the rings how much KV they retain of each conversation."""
        asked: dict[RingName, list[str]] = {}
        for conversation in conversations:
            for role, place in conversation.places.items():
                asked.setdefault((role, place.ring), []).append(conversation.conversation_id)
        answers = await asyncio.gather(*(self._ask(ring, names) for ring, names in asked.items()))
        return {
            ring: {name: (answer.incarnation, count) for name, count in zip(names, answer.num_tokens, strict=True)}
            for (ring, names), answer in zip(asked.items(), answers, strict=True)
            if answer is not None
        }

    async def _ask(self, key: RingName, conversation_ids: Sequence[str]) -> RetainedKv | None:
        role, name = key
        ring = self._rings.named(role, name)
        if ring is None or not ring.is_ready:
            return None
        try:
            return await self._peers.leader(role, ring.registration.endpoint).get_retained(conversation_ids)
        except RingserveError as error:
            log.info("%s ring %s cannot say what it retains: %s", role, name, error)
            return None

    def _view(self, conversation: Conversation, retained: Retained) -> ConversationInfo:
        """Show a conversation with only the KV that the rings confirm; a ring that does not answer confirms none."""
        limit = self.num_agreeing(conversation)

        def still_there() -> Iterable[tuple[str, KvLocation]]:
            for role, place in conversation.places.items():
                on_ring = retained.get((role, place.ring), {})
                incarnation, count = on_ring.get(conversation.conversation_id, ("", 0))
                left = place.cut(min(count, limit))
                if incarnation == place.incarnation and left.num_tokens:
                    yield role, left

        return conversation.view(self._store.clock(), still_there())

    # --- expiry ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Forget the conversations whose time to live is over; their KV is released in the background."""
        for old in self._store.expire():
            log.info("conversation %s has not been used for %.0f s", old.conversation_id, old.ttl_seconds)
            self._tasks.spawn(self._turns.free(old))

    def start_expiry(self) -> None:
        """Expire conversations regularly, unless that is under way, until no turn runs and none is due to expire."""
        if self._expiring is None or self._expiring.done():
            self._expiring = self._tasks.spawn(self._expire_regularly())

    async def _expire_regularly(self) -> None:
        while len(self._turns) or self._store.next_expiry is not None:
            await asyncio.sleep(EXPIRY_INTERVAL)
            self.expire()


def _summary(view: ConversationInfo) -> ConversationSummary:
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


def _with_last(view: ConversationInfo, conversation: Conversation) -> ConversationInfo:
    return view if conversation.tokens is None else replace(view, last_token=int(conversation.tokens[-1]))

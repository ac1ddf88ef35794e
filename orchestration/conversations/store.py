"""Store of the conversations that a router knows: their tokens, where their KV is, and which turn uses them.

The router owns the store; admission, operations, prefixes, quotas and rebalancing use it.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from ringserve.cp_core.errors import Busy, CapacityExceeded, ConversationLost, InvalidRequest, NotFound, RingserveError
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.placement.kv_locations import KvLocation, KvLocations
from ringserve.orchestration.protocol.journal import JournalPort, NoJournal, StoredConversation
from ringserve.orchestration.protocol.turns import tenant_of
from ringserve.orchestration.protocol.views import rank_shards
from ringserve.views import ConversationInfo, Placement
from ringserve.workers.protocol.steps import TokenIds

UNNAMED = "\u00adprompt-"
"""Beginning of the ids of unnamed conversations. Clients cannot name one: its first character cannot be printed."""
MAX_GONE = 10_000
"""Most forgotten conversations for which the reason is remembered; the oldest ones are dropped."""


@dataclass(slots=True)
class Waiter:
    """Turn that waits for its conversation. `error` ends the wait."""

    request_id: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_granted: bool = False
    error: RingserveError | None = None

    def end(self, error: RingserveError) -> None:
        """End the wait with `error`."""
        self.error = error
        self.changed.set()


@dataclass(slots=True)
class Conversation:
    """Conversation with the `tokens` of all finished turns, and the `places` where their KV was put.

    `index` is the store's index of all places; each change of `places` is entered there.

    One turn at a time uses it (`running_request`). Turns in `waiting` follow in order of arrival. No turn begins while
    `num_forks` forks of it are under way, or while its KV is moved to another ring. During a move, `moved` is an event,
    which the end of the move sets. Times are on the store's clock; `ttl_seconds` 0 means for ever. At `due_at` the
    store looks whether the conversation has expired.

    If a journal remembers the tokens, `read` reads them at their first use. `last_turn` is the id of the turn that made
    the newest tokens. All KV of it was computed with `sparsity`; None: it is exact. Turns of another sparsity use none
    of it. `turn_ends` has the number of tokens after each of its latest turns. It begins anew when the router starts,
    and with a turn that was not appended to the history.
    """

    conversation_id: str
    num_tokens: int = 0
    read: Callable[[], TokenIds] | None = None
    last_turn: str = ""
    sparsity: Sparsity | None = None
    _tokens: TokenIds | None = None
    num_turns: int = 0
    turn_ends: list[int] = field(default_factory=list)
    _places: KvLocations = field(default_factory=KvLocations)
    index: PlacedConversations | None = None
    running_request: str = ""
    num_forks: int = 0
    is_deleting: bool = False
    moved: asyncio.Event | None = None
    forked_from: str = ""
    waiting: dict[str, Waiter] = field(default_factory=dict)
    ttl_seconds: float = 0.0
    last_used: float = 0.0
    due_at: float = math.inf

    @property
    def tokens(self) -> TokenIds | None:
        """Tokens of all finished turns; None before the first."""
        if self._tokens is None and self.read is not None:
            self._tokens, self.read = self.read(), None
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: TokenIds) -> None:
        self._tokens, self.read, self.num_tokens = tokens, None, len(tokens)

    def try_tokens(self) -> TokenIds | None:
        """Return `tokens`, or None if they are damaged in the journal: other conversations share nothing of them."""
        try:
            return self.tokens
        except ConversationLost:
            return None

    @property
    def places(self) -> KvLocations:
        """Locations of its KV."""
        return self._places

    @places.setter
    def places(self, places: KvLocations) -> None:
        before, self._places = self._places, places
        if self.index is not None:
            self.index.update(self, before, places)

    @property
    def has_finished(self) -> bool:
        """True if a turn of it has ended well, or if it is a fork, which has the tokens of its source."""
        return self.num_tokens > 0

    @property
    def prefill(self) -> KvLocation | None:
        """Location on a prefill ring."""
        return self.places.prefill

    @property
    def decode(self) -> KvLocation | None:
        """Location on a decode ring."""
        return self.places.decode

    @property
    def is_unnamed(self) -> bool:
        """True if the router made it for requests that name no conversation. No client sees it."""
        return is_unnamed(self.conversation_id)

    @property
    def expires_at(self) -> float:
        """Expiry time; infinity means never."""
        return self.last_used + self.ttl_seconds if self.ttl_seconds else math.inf

    @property
    def is_idle(self) -> bool:
        """True if no turn, fork, move or deletion uses it."""
        return not (self.running_request or self.num_forks or self.is_deleting or self.moved is not None)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is on a ring, as far as the router knows; those on two rings count once."""
        return max((place.num_tokens for _, place in self.places.items()), default=0)

    def release_kv(self) -> Conversation:
        """Forget where the KV is. Return a conversation of the same id with these places, for the caller to release."""
        left = Conversation(self.conversation_id)
        left.places = self.places
        self.places = self.places.changed(prefill=None, decode=None)
        return left

    @property
    def occupant(self) -> str:
        """What uses the conversation now, in words for errors."""
        if self.running_request:
            return f"request {self.running_request!r}"
        if self.is_deleting:
            return "its deletion"
        return "a fork of it" if self.num_forks else "a move of its KV"

    def view(self, now: float = 0.0, places: Iterable[tuple[str, KvLocation]] | None = None) -> ConversationInfo:
        """Show the conversation at the store's time `now`, with the KV `places` by role; None: all that it has."""
        return ConversationInfo(
            conversation_id=self.conversation_id,
            num_tokens=self.num_tokens,
            num_turns=self.num_turns,
            running_request_id=self.running_request,
            epoch=self.places.epoch,
            idle_seconds=0.0 if self.running_request else max(0.0, now - self.last_used),
            ttl_seconds=self.ttl_seconds,
            num_waiting=len(self.waiting),
            sparsity=self.sparsity,
            turn_ends=tuple(self.turn_ends),
            placements=tuple(
                Placement(
                    role=role,
                    ring=place.ring,
                    incarnation=place.incarnation,
                    num_tokens=place.num_tokens,
                    ranks=rank_shards(place.shards),
                    epoch=place.epoch,
                )
                for role, place in (self.places.items() if places is None else places)
            ),
        )


class PlacedConversations:
    """Index of conversations by the ring incarnations where their KV was put."""

    def __init__(self) -> None:
        self._at: dict[tuple[str, str, str], dict[str, Conversation]] = {}

    def update(self, conversation: Conversation, before: KvLocations, after: KvLocations) -> None:
        """Note that a conversation's KV is elsewhere."""
        for role, place in before.items():
            key = role, place.ring, place.incarnation
            here = self._at[key]
            del here[conversation.conversation_id]
            if not here:
                del self._at[key]
        for role, place in after.items():
            self._at.setdefault((role, place.ring, place.incarnation), {})[conversation.conversation_id] = conversation

    def at(self, role: str, ring: str, incarnation: str) -> list[Conversation]:
        """Return the conversations on an incarnation of a ring."""
        return list(self._at.get((role, ring, incarnation), {}).values())


def is_unnamed(conversation_id: str) -> bool:
    """Return whether an id, scoped or not, is of an unnamed conversation."""
    return UNNAMED in conversation_id


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """Return how many leading tokens of both agree."""
    shorter = min(len(left), len(right))
    differs = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(differs[0]) if len(differs) else shorter


class ConversationStore:
    """Store of at most `limit` conversations.

    An idle one makes room: of the tenant with the most conversations, an unnamed one first, then the least recently
    used. `on_finished` is called with each conversation that has new tokens, `on_left` with each that is forgotten.
    `ttl_seconds` is the time to live of conversations whose requests state none. `clock` tells seconds. `journal`
    outlives the store; the store begins with the conversations in the journal.
    """

    def __init__(
        self,
        limit: int,
        *,
        max_waiting: int = 64,
        ttl_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        journal: JournalPort | None = None,
    ) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._ttl_seconds = ttl_seconds
        self.clock = clock
        self.on_left: Callable[[Conversation], None] = _ignore
        self.on_finished: Callable[[Conversation], None] = _ignore
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._gone: OrderedDict[str, str] = OrderedDict()  # why conversations were forgotten, the latest last
        self._num_unnamed = 0
        self._index = PlacedConversations()
        self._of_tenant: dict[str, OrderedDict[str, Conversation]] = {}
        self._waiters: dict[str, Waiter] = {}
        # (when to look, id), soonest first. If the conversation was used before that time, it is entered again with a
        # later one.
        self._expiries: list[tuple[float, str]] = []
        self._journal = journal or NoJournal()
        now, wall_now = self.clock(), time.time()
        for stored in self._journal.conversations():
            self._restore(stored, now - max(0.0, wall_now - stored.last_used))

    def _restore(self, stored: StoredConversation, last_used: float) -> None:
        conversation = self._enter(stored.conversation_id)
        conversation.read = partial(self._journal.tokens_of, stored.conversation_id)
        conversation.num_tokens, conversation.num_turns = stored.num_tokens, stored.num_turns
        conversation.forked_from, conversation.last_turn = stored.forked_from, stored.last_turn
        conversation.sparsity = stored.sparsity
        conversation.ttl_seconds, conversation.last_used = stored.ttl_seconds, last_used
        self._note_expiry(conversation)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_unnamed(self) -> int:
        """Conversations of requests that named none."""
        return self._num_unnamed

    def get(self, conversation_id: str) -> Conversation:
        """Return a conversation. Raises NotFound."""
        conversation = self._known.get(conversation_id)
        if conversation is None or not (conversation.has_finished or conversation.running_request):
            raise NotFound(f"conversation_id: there is no conversation {conversation_id!r}")
        return conversation

    def known(self, conversation_id: str) -> Conversation | None:
        """Return a conversation, if it is known."""
        return self._known.get(conversation_id)

    def use(self, conversation: Conversation) -> None:
        """Note that its KV is used: others make room before it."""
        name = conversation.conversation_id
        self._known.move_to_end(name)
        self._of_tenant[tenant_of(name)].move_to_end(name)

    def is_known(self, conversation_id: str) -> bool:
        """Return whether the conversation exists, also during its first turn."""
        return conversation_id in self._known

    def why_gone(self, conversation_id: str) -> str:
        """Return why a conversation is not here, in words."""
        return self._gone.get(conversation_id, "it is not known here; it never existed, or only before a restart")

    def of_tenant(self, tenant: str) -> Collection[Conversation]:
        """Return the conversations whose id is `tenant/...`."""
        return self._of_tenant.get(tenant, {}).values()

    def page(self, prefix: str, after: str, limit: int) -> tuple[list[Conversation], str]:
        """Return a page of conversations in order of id, and `after` of the next page; empty if there is none.

        Their id begins with `prefix` and follows `after`. Unnamed ones are not shown.
        """
        names = (name for name in self._known if name.startswith(prefix) and name > after and not is_unnamed(name))
        found = heapq.nsmallest(limit + 1, names)
        next_after = found[limit - 1] if len(found) > limit else ""
        return [self._known[name] for name in found[:limit]], next_after

    # --- one turn at a time ------------------------------------------------------------------------------------------

    def open(
        self, conversation_id: str, request_id: str, ttl_seconds: float | None = None
    ) -> tuple[Conversation, list[Conversation]]:
        """Begin a turn of a conversation, new or old. Return it, and the conversations dropped to make room.

        Raises Busy while another turn of it runs.
        """
        conversation = self._known.get(conversation_id)
        if conversation is not None and not conversation.is_idle:
            raise Busy(
                f"conversation_id: {conversation_id!r} is busy with {conversation.occupant}; "
                f"one turn at a time is allowed (wait=true waits for it)"
            )
        if conversation is None:
            conversation = self._enter(conversation_id)
        conversation.running_request = request_id
        if ttl_seconds is not None:
            conversation.ttl_seconds = ttl_seconds
        return conversation, self._make_place(conversation)

    async def open_in_turn(
        self, conversation_id: str, request_id: str, ttl_seconds: float | None = None
    ) -> tuple[Conversation, list[Conversation]]:
        """Begin a turn of a conversation, after the turns that arrived earlier. Return what `open` does.

        Cancellation and `end_wait` also end the wait. Raises CapacityExceeded if too many wait already, and the error
        that `end_wait` was given.
        """
        conversation = self._known.get(conversation_id)
        if conversation is None or conversation.is_idle:
            return self.open(conversation_id, request_id, ttl_seconds)
        if len(conversation.waiting) >= self._max_waiting:
            raise CapacityExceeded(
                f"conversation_id: {len(conversation.waiting)} turns wait for {conversation_id!r} and at most "
                f"{self._max_waiting} are allowed; retry later"
            )
        waiter = Waiter(request_id)
        conversation.waiting[request_id] = self._waiters[request_id] = waiter
        try:
            await waiter.changed.wait()
            if waiter.error is not None:
                raise waiter.error
        except BaseException:
            if waiter.is_granted:
                self.close(conversation)
            raise
        finally:
            conversation.waiting.pop(request_id, None)
            self._waiters.pop(request_id, None)
        if ttl_seconds is not None:
            conversation.ttl_seconds = ttl_seconds
        self.use(conversation)
        return conversation, []

    def finish(self, conversation: Conversation, tokens: TokenIds, *, is_appended: bool = False) -> None:
        """Enter `tokens`, all tokens of the conversation after a turn that has finished.

        `is_appended`: the turn continued the whole history before it.
        """
        conversation.tokens = tokens
        conversation.num_turns += 1
        conversation.turn_ends = [*(conversation.turn_ends if is_appended else ()), len(tokens)]
        if conversation.conversation_id in self._known:
            self.on_finished(conversation)

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for its conversation."""
        return request_id in self._waiters

    def end_wait(self, request_id: str, error: RingserveError) -> bool:
        """End the wait of a request with `error`. Return False if no request of that id waits."""
        waiter = self._waiters.get(request_id)
        if waiter is not None:
            waiter.end(error)
        return waiter is not None

    def close(self, conversation: Conversation) -> None:
        """End the running turn and start the next that waits.

        A conversation that never finished a turn is forgotten.
        """
        conversation.running_request = ""
        self._pass_on(conversation)
        self._touch(conversation)
        if not conversation.has_finished and conversation.is_idle:
            self._leave(conversation.conversation_id)

    def _pass_on(self, conversation: Conversation) -> None:
        while conversation.is_idle and conversation.waiting:
            request_id = next(iter(conversation.waiting))
            waiter = conversation.waiting.pop(request_id)
            if waiter.error is None:
                conversation.running_request = request_id
                waiter.is_granted = True
                waiter.changed.set()

    # --- forks -------------------------------------------------------------------------------------------------------

    def begin_fork(self, source: Conversation, new_id: str, num_tokens: int) -> tuple[Conversation, list[Conversation]]:
        """Begin a conversation of the source's first `num_tokens` tokens.

        Return the fork, and the conversations dropped to make room. Until `end_fork` neither the source nor the fork
        takes a new turn. Raises InvalidRequest if `new_id` exists.
        """
        assert source.tokens is not None, "a conversation without a finished turn has nothing to fork"
        if new_id in self._known:
            raise InvalidRequest(f"new_id: conversation {new_id!r} exists already; choose another or delete it")
        fork = self._enter(new_id)
        fork.tokens = source.tokens[:num_tokens]
        fork.forked_from, fork.sparsity = source.conversation_id, source.sparsity
        fork.ttl_seconds = source.ttl_seconds
        source.num_forks += 1
        fork.num_forks += 1
        return fork, self._make_place(fork)

    def fork_of(self, source_id: str, new_id: str, num_tokens: int) -> Conversation | None:
        """Return the conversation `new_id`, if it is such a fork of `num_tokens` tokens and no turn has begun in it."""
        fork = self._known.get(new_id)
        if fork is None or fork.forked_from != source_id or fork.num_turns or fork.running_request:
            return None
        return fork if fork.num_tokens == num_tokens else None

    async def note_fork(self, fork: Conversation) -> None:
        """Write a fork to the journal. Raises Unavailable."""
        stored = StoredConversation(
            conversation_id=fork.conversation_id,
            num_tokens=fork.num_tokens,
            num_turns=fork.num_turns,
            forked_from=fork.forked_from,
            ttl_seconds=fork.ttl_seconds,
            last_used=time.time(),
            last_turn="",
            sparsity=fork.sparsity,
        )
        await self._journal.forked(fork.forked_from, stored)

    def end_fork(self, source: Conversation, fork: Conversation) -> None:
        """End a fork: both conversations take turns again."""
        for conversation in (source, fork):
            conversation.num_forks -= 1
            self.on_finished(conversation)
            self._pass_on(conversation)
            self._touch(conversation)

    # --- moves -------------------------------------------------------------------------------------------------------

    def placed_at(self, role: str, ring: str, incarnation: str) -> list[Conversation]:
        """Return the conversations whose KV was put on that incarnation of a ring."""
        return self._index.at(role, ring, incarnation)

    def can_move(self, conversation: Conversation) -> bool:
        """Return whether a conversation is idle and still in the store."""
        return conversation.is_idle and self._known.get(conversation.conversation_id) is conversation

    def begin_move(self, conversation: Conversation) -> None:
        """Reserve a conversation that can be moved; turns, forks and deletions wait until `end_move`."""
        assert self.can_move(conversation), f"{conversation.conversation_id!r} is in use"
        conversation.moved = asyncio.Event()

    def end_move(self, conversation: Conversation) -> None:
        """End a move, and start the next turn that waits."""
        assert conversation.moved is not None, "a move ends once"
        conversation.moved.set()
        conversation.moved = None
        self._pass_on(conversation)
        self._note_expiry(conversation)

    def is_moving(self, conversation_id: str) -> bool:
        """Return whether a new turn would wait only for a move of the conversation's KV, and for no other turn."""
        conversation = self._known.get(conversation_id)
        return conversation is not None and conversation.moved is not None and not conversation.waiting

    async def until_moved(self, conversation_id: str) -> None:
        """Wait until the conversation's KV is not being moved. Moves have a deadline of their own."""
        while (conversation := self._known.get(conversation_id)) is not None and conversation.moved is not None:
            await conversation.moved.wait()

    # --- ends --------------------------------------------------------------------------------------------------------

    def remove(self, conversation_id: str) -> Conversation:
        """Forget a conversation and return it. Raises NotFound, or Busy while a turn runs."""
        conversation = self._require_idle(conversation_id)
        self._leave(conversation_id, "it was deleted")
        return conversation

    def _require_idle(self, conversation_id: str) -> Conversation:
        conversation = self.get(conversation_id)
        if not conversation.is_idle:
            raise Busy(
                f"conversation_id: {conversation_id!r} is busy with {conversation.occupant} "
                f"and cannot be deleted until that ends"
            )
        return conversation

    async def delete(self, conversation_id: str) -> Conversation:
        """Forget a conversation in the journal, then here, and return it. Turns that wait for it meanwhile fail.

        If the deletion cannot be written to the journal, the conversation stays. Raises NotFound, Unavailable; Busy
        while a turn runs.
        """
        conversation = self._require_idle(conversation_id)
        conversation.is_deleting = True
        try:
            if conversation.has_finished:
                await self._journal.deleted([conversation_id])
        except RingserveError:
            conversation.is_deleting = False
            self._pass_on(conversation)
            self._touch(conversation)
            raise
        except asyncio.CancelledError:
            self._forget_deleted(conversation)  # the journal writes it all the same
            raise
        self._forget_deleted(conversation)
        return conversation

    def _forget_deleted(self, conversation: Conversation) -> None:
        conversation.is_deleting = False
        name = conversation.conversation_id
        for waiter in conversation.waiting.values():
            waiter.end(NotFound(f"conversation_id: {name!r} was deleted while this turn waited for it"))
        self._leave(name, "it was deleted")

    def expire(self) -> list[Conversation]:
        """Take out and return the idle conversations whose time to live is over."""
        now, expired = self.clock(), []
        while self._expiries and self._expiries[0][0] <= now:
            _, name = heapq.heappop(self._expiries)
            conversation = self._known.get(name)
            if conversation is None:
                continue
            conversation.due_at = math.inf
            if not conversation.is_idle or conversation.expires_at > now:
                self._note_expiry(conversation)
            else:
                self._leave(name, f"it was not used for {conversation.ttl_seconds:g} s, and expired")
                expired.append(conversation)
        return expired

    @property
    def next_expiry(self) -> float | None:
        """Time on the clock at which `expire` may have something to do."""
        while self._expiries and self._expiries[0][1] not in self._known:
            heapq.heappop(self._expiries)  # deleted, or dropped for want of room
        return self._expiries[0][0] if self._expiries else None

    def _enter(self, conversation_id: str) -> Conversation:
        self._gone.pop(conversation_id, None)
        conversation = Conversation(conversation_id, ttl_seconds=self._ttl_seconds, last_used=self.clock())
        conversation.index = self._index
        self._known[conversation_id] = conversation
        self._num_unnamed += conversation.is_unnamed
        self._of_tenant.setdefault(tenant_of(conversation_id), OrderedDict())[conversation_id] = conversation
        return conversation

    def _leave(self, conversation_id: str, why: str = "") -> None:
        """Forget a conversation, and remember `why`, if given. Idempotent."""
        conversation = self._known.pop(conversation_id, None)
        if conversation is None:
            return
        conversation.index = None
        self._index.update(conversation, conversation.places, KvLocations())
        if why and not conversation.is_unnamed:
            self._gone[conversation_id] = why
            if len(self._gone) > MAX_GONE:
                self._gone.popitem(last=False)
        self._num_unnamed -= conversation.is_unnamed
        self.on_left(conversation)
        if conversation.has_finished and not conversation.is_unnamed:
            self._journal.deleted([conversation_id])
        tenant = tenant_of(conversation_id)
        del self._of_tenant[tenant][conversation_id]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def _touch(self, conversation: Conversation) -> None:
        conversation.last_used = self.clock()
        self._note_expiry(conversation)

    def _note_expiry(self, conversation: Conversation) -> None:
        """Enter the time of the conversation's next look, unless an earlier one is entered.

        Nothing is entered while the conversation is in use; the end of its use does that.
        """
        if conversation.is_idle and conversation.expires_at < conversation.due_at:
            conversation.due_at = conversation.expires_at
            heapq.heappush(self._expiries, (conversation.expires_at, conversation.conversation_id))
            if len(self._expiries) > 2 * len(self._known) + 64:  # most are of conversations that were deleted
                due = ((known.due_at, name) for name, known in self._known.items())
                self._expiries = sorted(entry for entry in due if entry[0] < math.inf)

    def _make_place(self, newest: Conversation) -> list[Conversation]:
        self.use(newest)
        surplus = max(0, len(self._known) - self._limit)
        dropped = []
        for _ in range(surplus):
            oldest = self._least_needed()
            if oldest is None:
                break
            self._leave(
                oldest.conversation_id,
                f"it was dropped to make room: at most {self._limit} conversations are remembered",
            )
            dropped.append(oldest)
        return dropped

    def _least_needed(self) -> Conversation | None:
        """Return the idle conversation that makes room first.

        It is one of the tenant with the most conversations, so that no tenant displaces the conversations of others.
        Unnamed ones go first, then the least recently used ones.
        """
        for mine in sorted(self._of_tenant.values(), key=len, reverse=True):
            unnamed = (item for item in mine.values() if item.is_unnamed) if self._num_unnamed else ()
            named = (item for item in mine.values() if not item.is_unnamed)
            oldest = next((item for item in chain(unnamed, named) if item.is_idle), None)
            if oldest is not None:
                return oldest
        return None


def _ignore(conversation: Conversation) -> None:
    """Do nothing with a conversation."""

"""Store of the conversations that a router knows: their tokens, where their KV is, and which turn uses them."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice

from cp_core.errors import Busy, CapacityExceeded, InvalidRequest, NotFound, RingserveError
from orchestration.placement.kv_locations import KvLocation, KvLocations
from orchestration.protocol.views import ConversationView, KvLocationView
from workers.protocol.prefill_steps import TokenIds


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
    """Conversation with the `tokens` of all finished turns; `places` says where their KV was put.

    One turn at a time uses it (`running_request`). Turns in `waiting` follow in order of arrival. While `num_forks` are
    under way no other turn begins, nor while the KV is moved to another ring; the end of the move sets `moved`. Times
    are on the store's clock; `ttl_seconds` 0 means for ever. At `is_due_at` the store looks whether it has expired.
    """

    conversation_id: str
    tokens: TokenIds | None = None
    num_turns: int = 0
    places: KvLocations = field(default_factory=KvLocations)
    running_request: str = ""
    num_forks: int = 0
    moved: asyncio.Event | None = None
    forked_from: str = ""
    waiting: OrderedDict[str, Waiter] = field(default_factory=OrderedDict)
    ttl_seconds: float = 0.0
    last_used: float = 0.0
    is_due_at: float = math.inf

    @property
    def prefill(self) -> KvLocation | None:
        """Location on a prefill ring."""
        return self.places.prefill

    @property
    def decode(self) -> KvLocation | None:
        """Location on a decode ring."""
        return self.places.decode

    @property
    def expires_at(self) -> float:
        """Time of its expiry; infinity means never."""
        return self.last_used + self.ttl_seconds if self.ttl_seconds else math.inf

    @property
    def is_idle(self) -> bool:
        """True if no turn, fork or move uses it."""
        return not self.running_request and not self.num_forks and self.moved is None

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is on a ring, as far as the router knows; those on two rings count once."""
        return max((place.num_tokens for _, place in self.places.items()), default=0)

    def release_kv(self) -> Conversation:
        """Forget where the KV is. Return the locations, under the same id, for the caller to release on the rings."""
        left = Conversation(self.conversation_id, places=self.places)
        self.places = self.places.changed(prefill=None, decode=None)
        return left

    @property
    def occupant(self) -> str:
        """Its user, in words for errors."""
        if self.running_request:
            return f"request {self.running_request!r}"
        return "a fork of it" if self.num_forks else "a move of its KV"

    def view(self, now: float = 0.0) -> ConversationView:
        """Show the conversation as the store knows it."""
        return ConversationView(
            conversation_id=self.conversation_id,
            num_tokens=0 if self.tokens is None else len(self.tokens),
            num_turns=self.num_turns,
            running_request_id=self.running_request,
            epoch=self.places.epoch,
            idle_seconds=0.0 if self.running_request else max(0.0, now - self.last_used),
            ttl_seconds=self.ttl_seconds,
            num_waiting=len(self.waiting),
            placements=tuple(
                KvLocationView(
                    role=role,
                    ring=place.ring,
                    incarnation=place.incarnation,
                    num_tokens=place.num_tokens,
                    shards=place.shards,
                    epoch=place.epoch,
                )
                for role, place in self.places.items()
            ),
        )


def tenant_of(scoped_id: str) -> str:
    """Return the tenant of an id of the form `tenant/...`; empty where ids carry no tenant."""
    tenant, slash, _ = scoped_id.partition("/")
    return tenant if slash else ""


class ConversationStore:
    """Store of at most `limit` conversations. The least recently used idle one makes room for a new one.

    `ttl_seconds` is for conversations that name none. `clock` tells seconds.
    """

    def __init__(
        self,
        limit: int,
        *,
        max_waiting: int = 64,
        ttl_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._ttl_seconds = ttl_seconds
        self.clock = clock
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self._of_tenant: dict[str, dict[str, Conversation]] = {}
        self._waiters: dict[str, Waiter] = {}
        # (when to look, id), soonest first. Used since then, a conversation is entered again with a later moment.
        self._expiries: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._known)

    def get(self, conversation_id: str) -> Conversation:
        """Return a conversation. Raises NotFound."""
        conversation = self._known.get(conversation_id)
        if conversation is None or (conversation.tokens is None and not conversation.running_request):
            raise NotFound(f"conversation_id: there is no conversation {conversation_id!r}")
        return conversation

    def of_tenant(self, tenant: str) -> Collection[Conversation]:
        """Return the conversations whose id is `tenant/...`."""
        return self._of_tenant.get(tenant, {}).values()

    def page(self, prefix: str, after: str, limit: int) -> tuple[list[Conversation], str]:
        """Return a page of conversations by id, and where the next one begins.

        Their id begins with `prefix` and follows `after`.
        """
        names = (name for name in self._known if name.startswith(prefix) and name > after)
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
        """Begin a turn of a conversation behind those that arrived before. Return as `open` does.

        The wait ends by cancellation too, or by `end_wait`. Raises CapacityExceeded where too many wait already, and
        the error that `end_wait` was given.
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
        self._known.move_to_end(conversation_id)
        return conversation, []

    def is_waiting(self, request_id: str) -> bool:
        """Return whether a request waits for its conversation."""
        return request_id in self._waiters

    def end_wait(self, request_id: str, error: RingserveError) -> bool:
        """End the wait of a request with `error`. Return False where no request of that id waits."""
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
        if conversation.tokens is None and conversation.is_idle:
            self._leave(conversation.conversation_id)

    def _pass_on(self, conversation: Conversation) -> None:
        while conversation.is_idle and conversation.waiting:
            request_id, waiter = conversation.waiting.popitem(last=False)
            if waiter.error is None:
                conversation.running_request = request_id
                waiter.is_granted = True
                waiter.changed.set()

    # --- forks -------------------------------------------------------------------------------------------------------

    def begin_fork(self, source: Conversation, new_id: str, num_tokens: int) -> tuple[Conversation, list[Conversation]]:
        """Begin a conversation of the source's first `num_tokens` tokens. Return it, and those dropped to make room.

        Until `end_fork` neither takes a new turn. Raises InvalidRequest where `new_id` exists.
        """
        assert source.tokens is not None, "a conversation without a finished turn has nothing to fork"
        if new_id in self._known:
            raise InvalidRequest(f"new_id: conversation {new_id!r} exists already; choose another or delete it")
        fork = self._enter(new_id)
        fork.tokens = source.tokens[:num_tokens]
        fork.forked_from = source.conversation_id
        fork.ttl_seconds = source.ttl_seconds
        source.num_forks += 1
        fork.num_forks += 1
        return fork, self._make_place(fork)

    def fork_of(self, source_id: str, new_id: str, num_tokens: int) -> Conversation | None:
        """Return the conversation `new_id`, if it is just such a fork and no turn has begun in it."""
        fork = self._known.get(new_id)
        if fork is None or fork.forked_from != source_id or fork.num_turns or fork.running_request:
            return None
        return fork if fork.tokens is not None and len(fork.tokens) == num_tokens else None

    def end_fork(self, source: Conversation, fork: Conversation) -> None:
        """End a fork: both conversations take turns again."""
        for conversation in (source, fork):
            conversation.num_forks -= 1
            self._pass_on(conversation)
            self._touch(conversation)

    # --- moves -------------------------------------------------------------------------------------------------------

    def placed_at(self, role: str, ring: str, incarnation: str) -> list[Conversation]:
        """Return the conversations whose KV was put on that incarnation of a ring."""
        return [
            conversation
            for conversation in self._known.values()
            if (place := conversation.places.at(role)) and (place.ring, place.incarnation) == (ring, incarnation)
        ]

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
        """Return whether a new turn would wait for a move of the conversation's KV alone, and for no other turn."""
        conversation = self._known.get(conversation_id)
        return conversation is not None and conversation.moved is not None and not conversation.waiting

    async def until_moved(self, conversation_id: str) -> None:
        """Wait until the conversation's KV is not being moved. Moves have a deadline of their own."""
        while (conversation := self._known.get(conversation_id)) is not None and conversation.moved is not None:
            await conversation.moved.wait()

    # --- ends --------------------------------------------------------------------------------------------------------

    def remove(self, conversation_id: str) -> Conversation:
        """Forget a conversation and return it. Raises NotFound, or Busy while a turn runs."""
        conversation = self.get(conversation_id)
        if not conversation.is_idle:
            raise Busy(
                f"conversation_id: {conversation_id!r} is busy with {conversation.occupant} "
                f"and cannot be deleted until that ends"
            )
        self._leave(conversation_id)
        return conversation

    def expire(self) -> list[Conversation]:
        """Take out and return the idle conversations whose time to live is over."""
        now, expired = self.clock(), []
        while self._expiries and self._expiries[0][0] <= now:
            _, name = heapq.heappop(self._expiries)
            conversation = self._known.get(name)
            if conversation is None:
                continue
            conversation.is_due_at = math.inf
            if not conversation.is_idle or conversation.expires_at > now:
                self._note_expiry(conversation)
            else:
                self._leave(name)
                expired.append(conversation)
        return expired

    @property
    def next_expiry(self) -> float | None:
        """Time on the clock at which `expire` may have something to do."""
        while self._expiries and self._expiries[0][1] not in self._known:
            heapq.heappop(self._expiries)  # deleted, or dropped for want of room
        return self._expiries[0][0] if self._expiries else None

    def _enter(self, conversation_id: str) -> Conversation:
        conversation = Conversation(conversation_id, ttl_seconds=self._ttl_seconds, last_used=self.clock())
        self._known[conversation_id] = conversation
        self._of_tenant.setdefault(tenant_of(conversation_id), {})[conversation_id] = conversation
        return conversation

    def _leave(self, conversation_id: str) -> None:
        """Forget a conversation. Idempotent."""
        if self._known.pop(conversation_id, None) is None:
            return
        tenant = tenant_of(conversation_id)
        del self._of_tenant[tenant][conversation_id]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def _touch(self, conversation: Conversation) -> None:
        conversation.last_used = self.clock()
        self._note_expiry(conversation)

    def _note_expiry(self, conversation: Conversation) -> None:
        """Enter when to look, unless an earlier time is entered; a conversation in use is entered when it is idle."""
        if conversation.is_idle and conversation.expires_at < conversation.is_due_at:
            conversation.is_due_at = conversation.expires_at
            heapq.heappush(self._expiries, (conversation.expires_at, conversation.conversation_id))
            if len(self._expiries) > 2 * len(self._known) + 64:  # most are of conversations that were deleted
                due = ((known.is_due_at, name) for name, known in self._known.items())
                self._expiries = sorted(entry for entry in due if entry[0] < math.inf)

    def _make_place(self, newest: Conversation) -> list[Conversation]:
        self._known.move_to_end(newest.conversation_id)
        surplus = max(0, len(self._known) - self._limit)
        dropped = list(islice((item for item in self._known.values() if item.is_idle), surplus))
        for item in dropped:
            self._leave(item.conversation_id)
        return dropped

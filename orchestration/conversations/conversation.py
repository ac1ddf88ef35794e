"""One conversation as the router knows it: its tokens, where their KV is, and which turn uses it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from ringserve.cp_core.errors import ConversationLost, RingserveError
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.orchestration.placement.kv_locations import KvLocation, KvLocations
from ringserve.orchestration.protocol.views import rank_shards
from ringserve.views import ConversationInfo, Placement
from ringserve.workers.protocol.prefill_steps import TokenIds

UNNAMED = "\u00adprompt-"
"""Beginning of the ids of unnamed conversations. Clients cannot name one: its first character cannot be printed."""


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
    """Conversation with the `tokens` of all finished turns; `places` says where their KV was put, and `placed` is told.

    One turn at a time uses it (`running_request`). Turns in `waiting` follow in order of arrival. While `num_forks` are
    under way no other turn begins, nor while the KV is moved to another ring; the end of the move sets `moved`. Times
    are on the store's clock; `ttl_seconds` 0 means for ever. At `is_due_at` the store looks whether it has expired.

    The tokens of one that a journal remembers are read with their first use, by `read`. `last_turn` made the newest.
    All KV of it was computed with `sparsity`; None: it is exact. Turns of another sparsity use none of it. `turn_ends`
    are the numbers of tokens after each of its latest turns: those since the router began, of which each but the first
    was appended to the one before.
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
    placed: PlacedConversations | None = None
    running_request: str = ""
    num_forks: int = 0
    is_deleting: bool = False
    moved: asyncio.Event | None = None
    forked_from: str = ""
    waiting: dict[str, Waiter] = field(default_factory=dict)
    ttl_seconds: float = 0.0
    last_used: float = 0.0
    is_due_at: float = math.inf

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
        if self.placed is not None:
            self.placed.move(self, before, places)

    @property
    def has_finished(self) -> bool:
        """True if a turn of it has ended well, or it is a fork of one."""
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
        """True if it is of requests without a conversation: no client sees it."""
        return is_unnamed(self.conversation_id)

    @property
    def expires_at(self) -> float:
        """Time of its expiry; infinity means never."""
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
        """Forget where the KV is. Return the locations, under the same id, for the caller to release on the rings."""
        left = Conversation(self.conversation_id)
        left.places = self.places
        self.places = self.places.changed(prefill=None, decode=None)
        return left

    @property
    def occupant(self) -> str:
        """Its user, in words for errors."""
        if self.running_request:
            return f"request {self.running_request!r}"
        if self.is_deleting:
            return "its deletion"
        return "a fork of it" if self.num_forks else "a move of its KV"

    def view(self, now: float = 0.0, places: Iterable[tuple[str, KvLocation]] | None = None) -> ConversationInfo:
        """Show the conversation at the store's time `now`, with its KV in `places` by role; None: in all it knows."""
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

    def move(self, conversation: Conversation, before: KvLocations, after: KvLocations) -> None:
        """Take notice that a conversation's KV is elsewhere."""
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

"""Prompt prefixes whose KV is on rings: a history shares the KV of another that begins with the same tokens.

Every exact history whose KV rings retain can be shared, but only by prompts of the same tenant, or of a tenant in the
same community. A history belongs to a conversation. For requests that name none, the router makes *unnamed*
conversations. The sequence of the prompt shares blocks with the history's, as a fork does (`Reserve.shares`). The
prompt of a running turn can be shared as soon as it has been computed. Until then, other prompts that begin alike may
wait for it.

The index of histories is a radix tree. Each edge carries a run of tokens. Each node has the histories that end there:

    root ──"You are a helpful"──┬──" assistant. Summarize"── A
                                └──" pirate."──┬── B
                                               └──" Sing"── C

Tokens themselves are compared, so no history is ever taken for another. Edges are views of the histories' own arrays,
so no tokens are copied, and a history of any length adds at most two nodes.

The router looks prompts up here when it admits turns. This owns the index; it also tells the store which histories are
used, and what rings have evicted. Pure Python and synchronous.
"""

from __future__ import annotations

import asyncio
import heapq
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from ringserve.orchestration.conversations.store import UNNAMED, Conversation, ConversationStore, common_prefix
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, KvLocations, WantedTurn
from ringserve.orchestration.placement.registry import RingRegistry
from ringserve.orchestration.protocol.turns import tenant_of
from ringserve.workers.protocol.steps import TokenIds

MIN_SHARED = 16
"""Fewest tokens worth sharing: one block of the usual size. Only full blocks are shared; a part is copied."""
MAX_LOOKED_AT = 32
"""Most histories that are considered for one prompt, those with the longest shared prefix first."""


class _Node:
    """Tree node: `edge` leads to it from `parent`, `end` tokens lie between the root and the node.

    `children` has nodes by the first token of their edge. `histories` has the tokens of each history that ends here, by
    id. In both, the latest used is last.
    """

    __slots__ = ("children", "edge", "end", "histories", "parent")

    def __init__(self, parent: _Node | None, edge: TokenIds, end: int) -> None:
        self.parent = parent
        self.edge = edge
        self.end = end
        # Plain dicts, not OrderedDicts: Python's garbage collector does not track a leaf's dicts, and there may be
        # 100,000 leaves.
        self.children: dict[int, _Node] = {}
        self.histories: dict[str, TokenIds] = {}

    def latest(self, skipped: _Node | None = None) -> Iterator[tuple[str, TokenIds]]:
        """Yield the histories that end at this node or below it, except at or below its child `skipped`.

        The branch used latest comes first.
        """
        stack = [self]
        while stack:
            node = stack.pop()
            yield from reversed(node.histories.items())
            stack.extend(child for child in node.children.values() if child is not skipped)

    def borrow_edge(self) -> None:
        """Make the edge a view of a history that still ends here or below: a removed history's array can be freed."""
        _, tokens = next(self.latest())
        self.edge = tokens[self.end - len(self.edge) : self.end]

    def split(self, length: int) -> _Node:
        """Put a node `length` tokens along the edge and return it."""
        assert self.parent is not None, "the root has no edge"
        middle = _Node(self.parent, self.edge[:length], self.end - len(self.edge) + length)
        self.parent.children[int(self.edge[0])] = middle  # the key keeps its place in the dict's order
        self.parent, self.edge = middle, self.edge[length:]
        middle.children[int(self.edge[0])] = self
        return middle

    def join(self) -> None:
        """Take this node out of the tree: join its edge with the edge of its only child."""
        assert self.parent is not None, "the root stays"
        (child,) = self.children.values()
        _, tokens = next(child.latest())
        child.edge = tokens[self.end - len(self.edge) : child.end]
        child.parent = self.parent
        self.parent.children[int(child.edge[0])] = child


class PrefixIndex:
    """History index. The caller gives each history its id."""

    def __init__(self) -> None:
        self._root = _Node(None, np.empty(0, dtype=np.int64), 0)
        self._nodes: dict[str, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, key: str, tokens: TokenIds) -> None:
        """Enter a history, replacing the key's former one. The array must not change afterwards."""
        self.remove(key)
        node, at, rest = self._walk(tokens)
        if at < len(node.edge):
            node = node.split(at)
        if len(rest):
            node.children[int(rest[0])] = node = _Node(node, rest, len(tokens))
        node.histories[key] = tokens
        self._nodes[key] = node
        self.touch(key)

    def touch(self, key: str) -> None:
        """Note that a history is used: `matches` yields it before others that share as much. Idempotent."""
        node = self._nodes.get(key)
        if node is None:
            return
        node.histories[key] = node.histories.pop(key)
        while node.parent is not None:
            siblings, first = node.parent.children, int(node.edge[0])
            siblings[first] = siblings.pop(first)
            node = node.parent

    def remove(self, key: str) -> None:
        """Forget a history. Idempotent."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        del node.histories[key]
        while node.parent is not None and not node.histories and not node.children:
            del node.parent.children[int(node.edge[0])]
            node = node.parent
        above = node.parent
        if above is not None and not node.histories and len(node.children) == 1:
            node.join()
            node = above
        while node.parent is not None:
            node.borrow_edge()
            node = node.parent

    def matches(self, tokens: TokenIds, limit: int) -> Iterator[tuple[str, int]]:
        """Yield at most `limit` histories that begin as `tokens` do, and how many tokens they share.

        The longest shared prefix comes first; among equals, the latest used.
        """
        node, at, _ = self._walk(tokens)
        return islice(_around(node, node.end - len(node.edge) + at), limit)

    def _walk(self, tokens: TokenIds) -> tuple[_Node, int, TokenIds]:
        """Return the last node whose edge `tokens` enter, how many of the edge's they share, and those that remain."""
        node, rest = self._root, tokens
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                break
            shared = common_prefix(child.edge, rest)
            node, rest = child, rest[shared:]
            if shared < len(child.edge):
                return child, shared, rest
        return node, len(node.edge), rest


def _around(node: _Node | None, shared: int) -> Iterator[tuple[str, int]]:
    """Yield histories with the number of tokens they share.

    First come those at or below `node`, which share `shared`, then those at or below its ancestors, which share fewer.
    """
    below: _Node | None = None
    while node is not None and shared:
        for key, _ in node.latest(skipped=below):
            yield key, shared
        below, node = node, node.parent
        shared = 0 if node is None else node.end


@dataclass(frozen=True, slots=True)
class SharedKv:
    """KV of other histories that a prompt may share: at `prefill` and `decode`, as many tokens as each place has.

    `num_tokens` is the larger of the two. `kv_ids` has the id of the sequence at each place, by role.
    """

    num_tokens: int = 0
    prefill: KvLocation | None = None
    decode: KvLocation | None = None
    kv_ids: dict[str, str] = field(default_factory=dict)


NOTHING_SHARED = SharedKv()


@dataclass(slots=True, eq=False)
class PromptUnderWay:
    """Prompt of a running turn, on the rings of `choice`. `ready_at` is when its KV is predicted to be there.

    Once it has been computed, `places` says where the KV is, and other turns may share it until this turn ends.
    `is_settled` becomes true when the prompt has been computed or the turn has ended; then the `waiting` turns go on.
    `forget` removes the prompt from `PromptPrefixes`.
    """

    request_id: str
    kv_id: str
    tokens: TokenIds
    choice: Choice
    ready_at: float
    forget: Callable[[PromptUnderWay], None]
    places: KvLocations | None = None
    is_settled: bool = False
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def computed(self, prefill: KvLocation | None, decode: KvLocation) -> None:
        """Let other turns share the KV."""
        self.places = KvLocations(prefill=prefill, decode=decode)
        self._settle()

    def end(self) -> None:
        """Let no other turn share or await it any more. Idempotent."""
        self.forget(self)
        self._settle()

    def _settle(self) -> None:
        self.is_settled = True
        for each in self.waiting:
            if not each.done():
                each.set_result(None)


class PromptPrefixes:
    """Index, by tokens, of a store's histories and of the prompts of running turns.

    `num_agreeing` says how many leading tokens of a history still agree with the KV at its places. Fewer than
    `min_shared` tokens are not worth sharing. Tenants of one of the `communities` share with each other. `queried`
    counts the tokens of all prompts that were looked up, `hit` those for which KV was found.
    """

    def __init__(
        self,
        store: ConversationStore,
        rings: RingRegistry,
        num_agreeing: Callable[[Conversation], int],
        min_shared: int = MIN_SHARED,
        communities: Iterable[tuple[str, ...]] = (),
    ) -> None:
        self._scopes = {tenant: ",".join(members) for members in communities for tenant in members}
        self._store = store
        self._rings = rings
        self._num_agreeing = num_agreeing
        self._min_shared = min_shared
        self._histories: dict[str, PrefixIndex] = {}
        self._under_way: dict[str, PrefixIndex] = {}
        self._running: dict[str, PromptUnderWay] = {}  # by KV id
        self.queried = self.hit = 0
        store.on_finished, store.on_left = self._note, self._forget

    def _note(self, conversation: Conversation) -> None:
        if conversation.sparsity is not None:  # no other history shares approximate KV
            self._forget(conversation)
        elif conversation.conversation_id and (tokens := conversation.try_tokens()) is not None:
            index = self._histories.setdefault(self._scope(conversation.conversation_id), PrefixIndex())
            index.put(conversation.conversation_id, tokens)

    def _forget(self, conversation: Conversation) -> None:
        scope = self._scope(conversation.conversation_id)
        if (index := self._histories.get(scope)) is not None:
            index.remove(conversation.conversation_id)
            if not len(index):
                del self._histories[scope]

    def _scope(self, scoped_id: str) -> str:
        """Return the sharing group of the tenant in an id: its community's names joined by commas, or the tenant alone.

        Tenant names have no comma, so no group is taken for a tenant.
        """
        tenant = tenant_of(scoped_id)
        return self._scopes.get(tenant, tenant)

    def begin(self, request_id: str, kv_id: str, tokens: TokenIds, choice: Choice, ready_at: float) -> PromptUnderWay:
        """Enter the prompt of a turn whose rings are chosen. The caller ends it."""
        scope = self._scope(request_id)

        if (before := self._running.get(kv_id)) is not None:
            before.end()
        prompt = PromptUnderWay(request_id, kv_id, tokens, choice, ready_at, self._forget_running)
        self._under_way.setdefault(scope, PrefixIndex()).put(kv_id, tokens)
        self._running[kv_id] = prompt
        return prompt

    def _forget_running(self, prompt: PromptUnderWay) -> None:
        kv_id, scope = prompt.kv_id, self._scope(prompt.request_id)
        if self._running.get(kv_id) is prompt:
            del self._running[kv_id]
            index = self._under_way[scope]
            index.remove(kv_id)
            if not len(index):
                del self._under_way[scope]

    def of_request(self, request_id: str) -> PromptUnderWay | None:
        """Return the prompt of a running turn, or None if other turns may not share or await it."""
        return next((each for each in self._running.values() if each.request_id == request_id), None)

    def coming(self, request_id: str, prompt: TokenIds) -> Iterator[tuple[PromptUnderWay, int]]:
        """Yield prompts of running turns that begin as this one does, and how many tokens they share, most first."""
        index = self._under_way.get(self._scope(request_id))
        for kv_id, shared in index.matches(prompt[:-1], MAX_LOOKED_AT) if index is not None else ():
            yield self._running[kv_id], shared

    def name_for(self, request_id: str, prompt: TokenIds) -> str:
        """Return the id of the unnamed conversation for a request that names none.

        It is an idle one of the tenant that the prompt continues. It is a new id if there is none, or if another
        history shares at least `min_shared` tokens more with the prompt.
        """
        tenant, most = tenant_of(request_id), 0
        for conversation, shared in self.matches(request_id, prompt):
            most = max(most, shared)
            if most - shared >= self._min_shared:
                break
            if (tokens := conversation.try_tokens()) is None or len(tokens) > shared:
                continue
            is_own = tenant_of(conversation.conversation_id) == tenant
            if is_own and conversation.is_unnamed and conversation.is_idle and shared < len(prompt):
                return conversation.conversation_id
        name = f"{UNNAMED}{uuid.uuid4().hex[:16]}"
        return f"{tenant}/{name}" if tenant else name

    def find(self, request_id: str, prompt: TokenIds) -> SharedKv:
        """Return, for each role, the longest KV on a ring that begins as the prompt does.

        Count the look-up, and note that the KV is used.
        """
        self.queried += len(prompt)
        shared, scope = self.look(request_id, prompt), self._scope(request_id)
        for kv_id in shared.kv_ids.values():
            conversation = self._store.known(kv_id)
            if conversation is not None:
                self._store.use(conversation)
            if scope in self._histories:
                self._histories[scope].touch(kv_id)
        self.hit += shared.num_tokens
        return shared

    def look(self, request_id: str, prompt: TokenIds) -> SharedKv:
        """Return what `find` does, but count nothing and mark nothing as used."""
        found = dict[str, tuple[KvLocation, str]]()
        # The last token is always computed: its logits give the first new one.
        histories = (
            (conversation.conversation_id, min(shared, self._num_agreeing(conversation)), conversation.places, shared)
            for conversation, shared in self.matches(request_id, prompt[:-1])
        )
        running = (
            (each.kv_id, shared, each.places, shared)
            for each, shared in self.coming(request_id, prompt)
            if each.places is not None
        )
        for kv_id, agreeing, places, shared in heapq.merge(histories, running, key=lambda item: -item[3]):
            if shared < self._min_shared or (
                len(found) == 2 and all(place.num_tokens >= shared for place, _ in found.values())
            ):
                break
            for role, place in places.items():
                most = found[role][0].num_tokens if role in found else self._min_shared - 1
                if min(agreeing, place.num_tokens) > most and self._is_there(role, place):
                    found[role] = place.cut(agreeing), kv_id
        if not found:
            return NOTHING_SHARED
        return SharedKv(
            num_tokens=max(place.num_tokens for place, _ in found.values()),
            prefill=found["prefill"][0] if "prefill" in found else None,
            decode=found["decode"][0] if "decode" in found else None,
            kv_ids={role: kv_id for role, (_, kv_id) in found.items()},
        )

    def agreeing(self, wanted: WantedTurn, prompt: TokenIds) -> WantedTurn:
        """Return a turn with those places of shared KV that still agree with its prompt.

        A history may have been replaced since the turn found it: another turn has edited it, or it was deleted.
        """
        places, shared = {"prefill": wanted.prefill, "decode": wanted.decode}, dict[str, str]()
        for role, kv_id in wanted.shared.items():
            place = places[role]
            if place is not None and self._agrees(kv_id, prompt[: min(wanted.match_tokens, place.num_tokens)]):
                shared[role] = kv_id
            else:
                places[role] = None
        return replace(wanted, shared=shared, prefill=places["prefill"], decode=places["decode"])

    def _agrees(self, kv_id: str, beginning: TokenIds) -> bool:
        length, running, history = len(beginning), self._running.get(kv_id), self._store.known(kv_id)
        if running is not None and common_prefix(running.tokens, beginning) == length:
            return True
        tokens = None if history is None or self._num_agreeing(history) < length else history.try_tokens()
        return tokens is not None and common_prefix(tokens, beginning) == length

    def matches(self, request_id: str, prompt: TokenIds) -> Iterator[tuple[Conversation, int]]:
        """Yield a few histories that begin as the prompt does, with the number of tokens they share, most first."""
        index = self._histories.get(self._scope(request_id))
        for name, shared in index.matches(prompt, MAX_LOOKED_AT) if index is not None else ():
            conversation = self._store.known(name)
            if conversation is not None:
                yield conversation, shared

    def _is_there(self, role: str, place: KvLocation) -> bool:
        ring = self._rings.named(role, place.ring)
        return ring is not None and ring.is_ready and ring.registration.incarnation == place.incarnation

    def note_retained(self, kv_id: str, role: str, incarnation: str, num_tokens: int) -> None:
        """Note that a ring has no more than `num_tokens` tokens of a history: it has evicted the others."""
        conversation = self._store.known(kv_id)
        place = None if conversation is None else conversation.places.at(role)
        if conversation is None or place is None or place.incarnation != incarnation or not conversation.is_idle:
            return
        if num_tokens < place.num_tokens:
            left = place.cut(num_tokens) if num_tokens else None
            conversation.places = conversation.places.put(role, left)

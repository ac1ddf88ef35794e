"""Prompts of a trace that begin alike and share KV, by the router's own index; and the hits of an ideal cache.

Used by `simulation.Simulation` for traces with block ids. Each block id is given to the router's index as if it were a
token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ringserve.cp_core.layout.shards import ShardMap, TokenRange
from ringserve.orchestration.conversations.prefixes import PromptPrefixes, SharedKv
from ringserve.orchestration.conversations.store import Conversation, ConversationStore
from ringserve.orchestration.placement.kv_locations import Choice, KvLocation, KvLocations, WantedTurn
from ringserve.orchestration.placement.registry import RegisteredRing
from ringserve.services.offline.simulator.cluster import Cluster
from ringserve.services.offline.simulator.trace import BLOCK_TOKENS, TracedConversation

MAX_HISTORIES = 100_000


def location(ring: RegisteredRing, num_tokens: int) -> KvLocation:
    """Return the location of KV on a ring, without its ranks, which the simulation ignores."""
    shards = ShardMap.of(((TokenRange(0, num_tokens),),))
    return KvLocation(ring=ring.name, incarnation=ring.registration.incarnation, shards=shards)


class SharedPrompts:
    """Histories of computed prompts, and the tokens that later prompts share with them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._store = ConversationStore(MAX_HISTORIES)
        self._prefixes = PromptPrefixes(self._store, cluster.registry, _num_blocks, min_shared=1)

    def find(self, wanted: WantedTurn, block_ids: Sequence[int], choice: Choice | None = None) -> WantedTurn:
        """Return the turn with the KV that it can share. If `choice` is given, only KV on the chosen rings counts."""
        prompt = np.asarray(block_ids, dtype=np.int64)
        found = self._prefixes.find("", prompt) if choice is None else self._find_on(choice, prompt)
        most = wanted.num_tokens - 1
        return replace(
            wanted,
            match_tokens=min(found.num_tokens * BLOCK_TOKENS, most),
            prefill=self._on_ring("prefill", found, most),
            decode=self._on_ring("decode", found, most),
            shared=found.kv_ids,
        )

    def _find_on(self, choice: Choice, prompt: np.ndarray) -> SharedKv:
        """Return the KV that the chosen rings have for the prompt, each looked up by itself."""
        found = dict[str, tuple[KvLocation, str]]()
        for conversation, shared in self._prefixes.matches("", prompt[:-1]):
            for role, ring in (("prefill", choice.prefill), ("decode", choice.decode)):
                place = conversation.places.at(role)
                if role not in found and place is not None and place.ring == ring.name:
                    found[role] = place.cut(shared), conversation.conversation_id
        return SharedKv(
            num_tokens=max((place.num_tokens for place, _ in found.values()), default=0),
            prefill=found["prefill"][0] if "prefill" in found else None,
            decode=found["decode"][0] if "decode" in found else None,
            kv_ids={role: kv_id for role, (_, kv_id) in found.items()},
        )

    def _on_ring(self, role: str, found: SharedKv, most: int) -> KvLocation | None:
        """Return the location that the index has found, in tokens.

        If the ring has evicted some of them since, the index forgets these for later turns.
        """
        place = found.prefill if role == "prefill" else found.decode
        if place is None:
            return None
        ring = (self._cluster.prefill if role == "prefill" else self._cluster.decode)[place.ring]
        kv_id = found.kv_ids[role]
        held = ring.kv.held(kv_id) // BLOCK_TOKENS
        if held < place.num_tokens:
            self._prefixes.note_retained(kv_id, role, place.incarnation, held)
        return location(ring.entry, min(place.num_tokens * BLOCK_TOKENS, most))

    def note(self, kv_id: str, block_ids: Sequence[int], choice: Choice) -> None:
        """Enter a request whose prompt is computed and on both rings."""
        conversation, _ = self._store.open(kv_id, kv_id)
        blocks = len(block_ids)
        conversation.places = KvLocations().changed(
            prefill=location(choice.prefill, blocks), decode=location(choice.decode, blocks)
        )
        self._store.finish(conversation, np.asarray(block_ids, dtype=np.int64))
        self._store.close(conversation)


def _num_blocks(conversation: Conversation) -> int:
    return 0 if conversation.tokens is None else len(conversation.tokens)


def ideal_share(trace: Iterable[TracedConversation], room: int | None = None) -> float:
    """Return the share of all prompt tokens that one LRU cache of `room` tokens holds when they are asked for.

    `room` None is no limit. `trace` is in order of arrival.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    served = total = 0
    for request in trace:
        prompt = request.turns[0].new_tokens
        is_hit = True
        for place, block in enumerate(request.block_ids):
            size = min(BLOCK_TOKENS, prompt - place * BLOCK_TOKENS)
            is_hit = is_hit and block in cache
            served += size * is_hit
        for block in reversed(request.block_ids):  # so that the prompt's first block is used last, and evicted last
            cache[block] = None
            cache.move_to_end(block)
        while room is not None and len(cache) * BLOCK_TOKENS > room:
            cache.popitem(last=False)
        total += prompt
    return served / max(1, total)

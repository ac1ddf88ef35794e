"""Parts of the router's work, one by one, at the sizes of a large service.

The router bench calls `measure_parts`, which makes each part anew and writes only into the given journal.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.router.load import VOCABULARY
from bench.router.records import first_turn
from ringserve.cp_core.layout.shards import ShardMap, appended, spread
from ringserve.orchestration.conversations.prefixes import PrefixIndex
from ringserve.orchestration.conversations.store import ConversationStore
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.placement.kv_locations import KvLocation, KvLocations
from ringserve.orchestration.ring.kv_pool import KvPool
from ringserve.services.offline.reports import Summary
from ringserve.workers.protocol.steps import TokenIds

LOOKED_UP = 1 << 17
"""Tokens of the prompt that the prefix index looks up."""
BRANCHES = 64
"""Number of histories that start like that prompt, each for another length."""
POOL_RANKS, POOL_BLOCKS, BLOCK_TOKENS = 8, 8192, 16
"""Size of the full KV pool in which a sequence grows."""
ANSWER = 1000
"""Tokens of the answer in the layout, and of the prompt and the answer in the journal's records."""
LAYOUT_RANKS = 2
"""Ranks over which a decode ring spreads the answer's KV."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartsReport:
    """Milliseconds of parts, and bytes.

    `lookup` finds a long prompt among the load's histories, `branched_lookup` when many of these also start like it.
    `pool_growth` makes room in a full pool, which evicts. `placed_at` finds the conversations of one ring. `begun` and
    `committed` write these records to the journal, None without one. `index_bytes_per_block` is the memory of the
    prefix index for 16 tokens, `layout_bytes_per_token` that of a decoded token's place.
    """

    lookup: Summary
    branched_lookup: Summary
    pool_growth: Summary
    placed_at: Summary
    begun: Summary | None
    committed: Summary | None
    index_bytes_per_history: float
    index_bytes_per_block: float
    layout_bytes_per_token: float


def measure_parts(conversations: int, rings: int, tokens: int, rounds: int, journal: Path | None) -> PartsReport:
    """Measure each part `rounds` times, with as many histories of `tokens` tokens as there are conversations."""
    ids = np.random.default_rng(0)
    histories = [ids.integers(0, VOCABULARY, tokens) for _ in range(conversations)]
    index, num_bytes = _traced(lambda: _index_of(histories))
    prompt = ids.integers(0, VOCABULARY, LOOKED_UP)
    index.put("long", prompt.copy())
    lookup = _timed(lambda: list(index.matches(prompt, 1)), rounds)
    for number in range(BRANCHES):
        shared = LOOKED_UP * (number + 1) // (BRANCHES + 1)
        index.put(f"branch-{number}", np.concatenate([prompt[:shared], ids.integers(0, VOCABULARY, tokens)]))
    branched = _timed(lambda: list(index.matches(prompt, 1)), rounds)
    begun, committed = (None, None) if journal is None else asyncio.run(_record_seconds(journal, rounds))
    _, layout_bytes = _traced(_answer_layout)
    return PartsReport(
        lookup=lookup,
        branched_lookup=branched,
        pool_growth=_pool_growth(rounds),
        placed_at=_placed_at(conversations, rings, rounds),
        begun=begun,
        committed=committed,
        index_bytes_per_history=num_bytes / conversations,
        index_bytes_per_block=num_bytes * BLOCK_TOKENS / (conversations * tokens),
        layout_bytes_per_token=layout_bytes / ANSWER,
    )


def _timed(work: Callable[[], object], rounds: int) -> Summary:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return Summary.of(seconds, 1e3)


def _traced(make: Callable[[], T]) -> tuple[T, int]:
    """Return what is made, and the bytes that it takes."""
    gc.collect()
    tracemalloc.start()
    made = make()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return made, num_bytes


def _index_of(histories: list[TokenIds]) -> PrefixIndex:
    index = PrefixIndex()
    for number, tokens in enumerate(histories):
        index.put(f"history-{number}", tokens)
    return index


def _answer_layout() -> ShardMap:
    """Return the shards of an answer whose tokens go from rank to rank, one by one."""
    owners = [number % LAYOUT_RANKS for number in range(ANSWER)]
    return ShardMap.empty(LAYOUT_RANKS).extend(appended(0, owners, LAYOUT_RANKS))


def _pool_growth(rounds: int) -> Summary:
    """Return the times in which a full pool gives a running turn one more block on each rank."""
    pool = KvPool(POOL_RANKS, POOL_BLOCKS, BLOCK_TOKENS)
    tokens = POOL_RANKS * POOL_BLOCKS * BLOCK_TOKENS // 64
    for number in range(64):
        sequence = pool.pin(f"retained-{number}", "turn", 0)
        shards = spread(0, tokens, (0,) * POOL_RANKS)
        pool.make_room(sequence, shards.held)
        sequence.shards = shards
        pool.settle(sequence.kv_id, "turn", tokens)
    running = pool.pin("running", "turn", 0)
    held = iter(range(BLOCK_TOKENS, BLOCK_TOKENS * (rounds + 1), BLOCK_TOKENS))
    return _timed(lambda: pool.make_room(running, (next(held),) * POOL_RANKS), rounds)


def _placed_at(conversations: int, rings: int, rounds: int) -> Summary:
    store = ConversationStore(conversations)
    for number in range(conversations):
        conversation, _ = store.open(f"conversation-{number}", "request")
        place = KvLocation(ring=f"decode-{number % max(1, rings // 2)}", incarnation="first", shards=ShardMap.empty(1))
        conversation.places = KvLocations().put("decode", place)
        store.finish(conversation, np.zeros(1, dtype=np.int64))
        store.close(conversation)
    return _timed(lambda: store.placed_at("decode", "decode-0", "first"), rounds)


async def _record_seconds(directory: Path, rounds: int) -> tuple[Summary, Summary]:
    """Return the times until the records of a turn are durable."""
    journal = SqliteJournal(directory)
    begun, committed = [], []
    tokens = np.zeros(ANSWER, dtype=np.int64)
    for number in range(rounds):
        record, end = first_turn(f"turn-{number}", f"conversation-{number}", tokens, tokens)
        began = time.perf_counter()
        await journal.begun(record)
        begun.append(time.perf_counter() - began)
        began = time.perf_counter()
        await journal.committed(end)
        committed.append(time.perf_counter() - began)
    journal.close()
    return Summary.of(begun, 1e3), Summary.of(committed, 1e3)

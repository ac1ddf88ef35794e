"""A ring's part in moves of kept KV from one ring of its role to another.

The router asks the ring that is to have it (`take`), which asks the ring that keeps it (`send`). Each holds its own
blocks until its own ranks have let go: a move that fails leaves the source as it was and the target without a block of
it. The target takes what fits beside all that it has, and keeps it as a guest (`KvPool.settle`). What the source keeps
is freed by the router when its books name the target.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Coroutine
from typing import TypeVar

from cp_core.errors import RingserveError
from cp_core.layout.shards import TokenRange, spread
from orchestration.protocol.kv import SendKv, SentKv, TakeKv, TakenKv
from orchestration.protocol.ports import Peers
from orchestration.ring.kv_transfers import fetch, send
from orchestration.ring.life import Ring
from workers.protocol.steps import TransferKey

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_REMEMBERED = 1024
"""Moves that are over and whose outcome is still told when asked for again."""


class KvMoves:
    """Sends and takes of one leader. Losing the caller ends neither; their deadlines do, and `close`."""

    def __init__(self, ring: Ring, peers: Peers) -> None:
        self._ring = ring
        self._peers = peers
        self._sends: dict[TransferKey, tuple[str, asyncio.Task[SentKv]]] = {}
        self._takes: OrderedDict[TransferKey, tuple[str, asyncio.Task[TakenKv]]] = OrderedDict()

    async def send(self, request: SendKv) -> SentKv:
        """Send kept tokens of a sequence that no turn uses. Asking again while it runs joins it.

        Raises NotFound where they are not here, Busy while a turn has them, TransferError, Unavailable.
        """
        incarnation = request.source_incarnation
        key = TransferKey(request.transfer_id, request.attempt, incarnation, request.destination_incarnation)
        if key not in self._sends:
            self._ring.require_ready(incarnation)
            pool = self._ring.pool
            sequence = pool.hold(request.sequence_id, key.transfer_id, request.tokens.stop)
            kept = sequence.shards.num_tokens

            async def work() -> SentKv:
                try:
                    return await send(self._ring, sequence, request)
                finally:
                    pool.settle(request.sequence_id, key.transfer_id, kept)
                    del self._sends[key]

            self._sends[key] = request.sequence_id, _owned(work())
        return await asyncio.shield(self._sends[key][1])

    async def take(self, request: TakeKv) -> TakenKv:
        """Fetch a sequence that another ring keeps. Asking again joins, or is answered as before. Not an attempt twice.

        Raises CapacityExceeded where there is no spare room, Busy while a turn has the sequence here, and what kept the
        other ring from sending it.
        """
        ring = self._ring
        ring.require_ready()
        key = TransferKey(request.transfer_id, request.attempt, request.source_incarnation, ring.incarnation)
        if key not in self._takes:
            self._takes[key] = request.sequence_id, _owned(self._take(key, request))
            while len(self._takes) > MAX_REMEMBERED and next(iter(self._takes.values()))[1].done():
                self._takes.popitem(last=False)
        return await asyncio.shield(self._takes[key][1])

    async def _take(self, key: TransferKey, request: TakeKv) -> TakenKv:
        ring, pool, sequence_id = self._ring, self._ring.pool, request.sequence_id
        tokens, shards = TokenRange(0, request.num_tokens), spread(0, request.num_tokens, (0,) * pool.num_ranks)
        sequence, keep = pool.take_in(sequence_id, key.transfer_id, shards.held), 0
        try:
            source = self._peers.leader(request.source_role, request.source_endpoint)
            sent = await fetch(ring, sequence, source, key, tokens, shards, request.deadline_seconds)
            sequence.shards, keep = shards, request.num_tokens
        finally:
            pool.settle(sequence_id, key.transfer_id, keep, is_guest=True)
        log.info("ring %s took %d tokens of %s in %.3f s", ring.settings.name, keep, sequence_id, sent.seconds)
        return TakenKv(
            incarnation=key.destination, shards=shards, payload_bytes=sent.payload_bytes, seconds=sent.seconds
        )

    async def until_free(self, sequence_id: str) -> None:
        """Wait for moves of the sequence that nobody else waits for any more: what follows may have come already."""
        tasks: list[asyncio.Task[SentKv] | asyncio.Task[TakenKv]] = [
            task for moves in (self._sends, self._takes) for name, task in moves.values() if name == sequence_id
        ]
        moving = [task for task in tasks if not task.done()]
        if moving:
            await asyncio.wait(moving, timeout=self._ring.settings.control_timeout)  # then the pool says what holds it

    async def close(self) -> None:
        """End what is under way; the ring is being closed. Idempotent."""
        tasks = [task for moves in (self._sends, self._takes) for _, task in moves.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _owned(work: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """A task whose error is told to whoever asks, and to the log where nobody does any more."""
    task = asyncio.create_task(work)
    task.add_done_callback(_note)
    return task


def _note(task: asyncio.Task[T]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, RingserveError):
        log.info("a move of KV failed: %s", error)
    elif error is not None:
        log.error("a move of KV failed", exc_info=error)

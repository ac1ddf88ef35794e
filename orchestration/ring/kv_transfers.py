"""KV of sequences that ranks copy, send and receive: block copies on one ring, and transfers between two rings.

In a transfer the target ring reserves blocks, makes its ranks expect the bytes, asks the source's leader to send, and
has the tokens when every rank has received all of its bytes. The source holds the sequence until its ranks have stopped
reading it.

A *move* is a transfer between rings of one role, which the router asks for between turns (`KvMoves`). A move that fails
leaves the source as it was and the target without a block of the sequence. The router releases the source's KV once its
registry names the target.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence

from ringserve.cp_core.errors import RingserveError
from ringserve.cp_core.layout.reshard import plan_reshard
from ringserve.cp_core.layout.shards import ShardMap, TokenRange, spread
from ringserve.orchestration.protocol.ports import Peers, PrefillPort
from ringserve.orchestration.protocol.turns import SendKv, SentKv, TakeKv, TakenKv
from ringserve.orchestration.ring.kv_pool import KvPool, SequenceKv
from ringserve.orchestration.ring.life import Ring
from ringserve.orchestration.tasks import begin_joined, finish_despite_cancellation, gather_all, gather_first_error
from ringserve.workers.protocol.transfers import BlockPair, KvExpect, KvPart, KvSend, TransferKey

log = logging.getLogger(__name__)

BUSY_SECONDS = 1.0
"""Seconds that a send waits for a sequence in use before it is refused: a turn may just be handing it over."""
MAX_REMEMBERED = 1024
"""Most takes whose outcome is remembered for a caller that asks again."""


# --- copies within a ring --------------------------------------------------------------------------------------------


async def copy_blocks(ring: Ring, pool: KvPool, sequence: SequenceKv, incarnation: str) -> None:
    """Have the ranks make the block copies that a sequence needs before it is written.

    A cancelled caller still waits for the copies: they must not outlive the hold on their blocks. Each rank must answer
    within the control timeout; if one fails, the ring is lost. Raises Unavailable.
    """
    if not sequence.copies:
        return
    ring.require_ready(incarnation)
    pairs: dict[int, list[BlockPair]] = {}
    for copy in sequence.copies:
        pairs.setdefault(copy.rank, []).append(BlockPair(source=copy.source, destination=copy.destination))
    timeout = ring.settings.control_timeout
    ranks = [(port, pairs[rank]) for port, rank in zip(ring.ranks, ring.cp_ranks, strict=True) if rank in pairs]

    async def copy_on_ranks() -> None:
        try:
            await gather_all(port.copy_blocks(own, timeout) for port, own in ranks)
        except RingserveError as error:
            ring.report_lost(error, incarnation)
            raise
        pool.copied(sequence)

    await finish_despite_cancellation(copy_on_ranks())


# --- transfers between rings -----------------------------------------------------------------------------------------


def sends_for(
    key: TransferKey,
    source: ShardMap,
    destination: ShardMap,
    tokens: TokenRange,
    *,
    blocks: Sequence[tuple[int, ...]],
    kv_endpoints: Sequence[str],
    num_kv_heads: int,
    source_tp: int = 1,
    destination_tp: int = 1,
) -> list[KvSend]:
    """Return one `KvSend` per source process; together they move `tokens` from `source` to `destination`.

    `source`, `destination` and `blocks` are by cp rank; the `tp` processes of one rank share them. `kv_endpoints` and
    the result are by process (cp_rank * tp + tp_rank). Raises ReshardError when either map does not hold every token of
    `tokens` exactly once, or when `source_tp` or `destination_tp` does not divide the KV heads.
    """
    plan = plan_reshard(
        source,
        destination.within(tokens),
        tokens,
        num_kv_heads=num_kv_heads,
        source_tp=source_tp,
        destination_tp=destination_tp,
    )
    parts: list[list[KvPart]] = [[] for _ in range(source.num_ranks * source_tp)]
    for (source_rank, destination_rank), pieces in sorted(plan.pieces.items()):
        parts[source_rank].append(KvPart(kv_endpoints[destination_rank], tuple(pieces)))
    return [KvSend(key, blocks[rank // source_tp], tuple(own)) for rank, own in enumerate(parts)]


async def send(ring: Ring, sequence: SequenceKv, request: SendKv) -> SentKv:
    """Send the tokens of `request` from a sequence that the caller holds until this call has ended.

    The caller must not cancel it; the request's deadline bounds it. Raises TransferError, Unavailable.
    """
    started = time.monotonic()
    settings = ring.settings
    sends = sends_for(
        request.key,
        sequence.shards,
        request.shards,
        request.tokens,
        blocks=[sequence.table(rank) for rank in range(settings.num_ranks)],
        kv_endpoints=request.kv_endpoints,
        num_kv_heads=ring.model.num_kv_heads,
        source_tp=settings.ranks.tp,
        destination_tp=request.tp,
    )
    calls = zip(ring.ranks, sends, strict=True)
    reports = await gather_all(port.send_kv(send, request.deadline_seconds) for port, send in calls)
    return SentKv(payload_bytes=sum(report.payload_bytes for report in reports), seconds=time.monotonic() - started)


async def expect(ring: Ring, sequence: SequenceKv, key: TransferKey, shards: ShardMap) -> None:
    """Make every rank expect its tokens of `shards`, to be stored behind those that it holds. Raises Unavailable."""
    held, timeout = sequence.shards.held, ring.settings.control_timeout
    expects = [KvExpect(key, tuple(shards.ranks[rank]), held[rank], sequence.table(rank)) for rank in ring.cp_ranks]
    await gather_all(port.expect_kv(each, timeout) for port, each in zip(ring.ranks, expects, strict=True))


async def fetch(
    ring: Ring,
    sequence: SequenceKv,
    source: PrefillPort,
    key: TransferKey,
    tokens: TokenRange,
    shards: ShardMap,
    deadline_seconds: float,
    *,
    kv_id: str = "",
    turn_id: str = "",
) -> SentKv:
    """Have `source` send `tokens` to their places in `shards`; the sequence has blocks for them.

    `kv_id` is the sequence's id on the source, if it is another than here. `turn_id` is the turn that has it pinned
    there, if any. However this call ends, no rank of the ring writes for the transfer afterwards.

    Raises the error of either side.
    """
    started = time.monotonic()
    request = SendKv(
        transfer_id=key.transfer_id,
        attempt=key.attempt,
        kv_id=kv_id or sequence.kv_id,
        turn_id=turn_id,
        source_incarnation=key.source,
        destination_incarnation=key.destination,
        tokens=tokens,
        shards=shards,
        kv_endpoints=ring.kv_endpoints,
        tp=ring.settings.ranks.tp,
        deadline_seconds=deadline_seconds,
    )
    try:
        await expect(ring, sequence, key, shards)
        sent = await source.send_kv(request)
        await gather_first_error(port.await_kv(key, deadline_seconds) for port in ring.ranks)
    except BaseException:
        # Also when cancelled: no late byte may land in blocks that are about to be free.
        await finish_despite_cancellation(drop(ring, key))
        raise
    return SentKv(payload_bytes=sent.payload_bytes, seconds=time.monotonic() - started)


async def drop(ring: Ring, key: TransferKey) -> None:
    """Return when no rank writes for the transfer. A rank that does not answer could still write: its ring is lost."""
    timeout = ring.settings.control_timeout
    try:
        await gather_all(port.drop_kv(key, timeout) for port in ring.ranks)
    except RingserveError as error:
        ring.report_lost(error, key.destination)


class KvMoves:
    """Sends and takes of one leader. If their caller is lost, they go on; their deadlines and `close` end them."""

    def __init__(self, ring: Ring, peers: Peers) -> None:
        self._ring = ring
        self._peers = peers
        self._sends: dict[TransferKey, tuple[str, asyncio.Task[SentKv]]] = {}
        self._takes: OrderedDict[TransferKey, tuple[str, asyncio.Task[TakenKv]]] = OrderedDict()

    async def send(self, request: SendKv) -> SentKv:
        """Send retained tokens of a sequence that no turn uses. A second call during the first joins it.

        If a turn still has the sequence pinned, the send waits up to BUSY_SECONDS for it. Raises NotFound if the tokens
        are not here, Busy while a turn has them, TransferError, Unavailable.
        """
        key = request.key
        if key not in self._sends:
            self._ring.require_ready(request.source_incarnation)
            self._sends[key] = request.kv_id, begin_joined("a move of KV", self._send(key, request))
        return await asyncio.shield(self._sends[key][1])

    async def _send(self, key: TransferKey, request: SendKv) -> SentKv:
        pool, kv_id, holder = self._ring.pool, request.kv_id, key.transfer_id
        try:
            await pool.until_unpinned(kv_id, BUSY_SECONDS)
            self._ring.require_ready(request.source_incarnation)
            sequence = pool.hold(kv_id, holder, request.tokens.stop)
            retained = sequence.shards.num_tokens
            try:
                return await send(self._ring, sequence, request)
            finally:
                pool.settle(kv_id, holder, retained)
        finally:
            del self._sends[key]

    async def take(self, request: TakeKv) -> TakenKv:
        """Fetch a sequence that another ring retains, at most once per attempt.

        A second call joins the first, or returns its outcome. Raises CapacityExceeded if there is no spare room,
        Busy while a turn has the sequence here, and the error that stopped the other ring from sending it.
        """
        ring = self._ring
        ring.require_ready()
        key = TransferKey(request.transfer_id, request.attempt, request.source_incarnation, ring.incarnation)
        if key not in self._takes:
            self._takes[key] = request.kv_id, begin_joined("a move of KV", self._take(key, request))
            while len(self._takes) > MAX_REMEMBERED and next(iter(self._takes.values()))[1].done():
                self._takes.popitem(last=False)
        return await asyncio.shield(self._takes[key][1])

    async def _take(self, key: TransferKey, request: TakeKv) -> TakenKv:
        ring, pool, kv_id = self._ring, self._ring.pool, request.kv_id
        tokens, shards = TokenRange(0, request.num_tokens), spread(0, request.num_tokens, (0,) * pool.num_ranks)
        sequence, retained = pool.take_in(kv_id, key.transfer_id, shards.held), 0
        try:
            source = self._peers.leader(request.source_role, request.source_endpoint)
            sent = await fetch(ring, sequence, source, key, tokens, shards, request.deadline_seconds)
            sequence.shards, retained = shards, request.num_tokens
        finally:
            pool.settle(kv_id, key.transfer_id, retained, is_guest=True)
        log.info("ring %s took %d tokens of %s in %.3f s", ring.settings.name, retained, kv_id, sent.seconds)
        return TakenKv(
            incarnation=key.destination, shards=shards, payload_bytes=sent.payload_bytes, seconds=sent.seconds
        )

    async def until_free(self, kv_id: str) -> None:
        """Wait for a move that has the sequence pinned: its caller may be gone, and the next turn may be here.

        A send that itself waits for a turn does not count. After the control timeout this returns anyway; the pool then
        refuses the turn and names the holder.
        """
        sequence = self._ring.pool.get(kv_id)
        holder = sequence.pinned_by if sequence is not None else None
        moving: list[asyncio.Task[SentKv] | asyncio.Task[TakenKv]] = [
            task
            for moves in (self._sends, self._takes)
            for key, (name, task) in moves.items()
            if name == kv_id and key.transfer_id == holder and not task.done()
        ]
        if moving:
            await asyncio.wait(moving, timeout=self._ring.settings.control_timeout)

    async def close(self) -> None:
        """End moves under way; the ring is being closed. Idempotent."""
        tasks = [task for moves in (self._sends, self._takes) for _, task in moves.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

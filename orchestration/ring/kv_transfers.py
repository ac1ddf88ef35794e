"""KV of one sequence that goes from ring to ring: what the leader on either side has its ranks do.

The ring that wants it reserves blocks, lets its ranks expect the bytes, asks the other's leader to send, and has the
tokens when every rank is sealed. The other holds the sequence until its ranks have let go of it, whatever comes.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from cp_core.errors import RingserveError
from cp_core.layout.shards import ShardMap, TokenRange
from orchestration.protocol.kv import SendKv, SentKv
from orchestration.ring.kv_pool import SequenceKv
from orchestration.ring.life import Ring, gather_all, gather_first_error
from orchestration.ring.reshard_sends import sends_for
from workers.protocol.steps import KvExpect, TransferKey


class KvSource(Protocol):
    """A leader whose ring keeps KV."""

    async def send_kv(self, request: SendKv) -> SentKv: ...


async def send(ring: Ring, sequence: SequenceKv, request: SendKv) -> SentKv:
    """Send what `request` names of a sequence that the caller holds until this has ended: it is not to be cancelled.

    The request's deadline bounds it. Raises TransferError, Unavailable.
    """
    started = time.monotonic()
    settings = ring.settings
    sends = sends_for(
        TransferKey(request.transfer_id, request.attempt, request.source_incarnation, request.destination_incarnation),
        sequence.shards,
        request.shards,
        request.tokens,
        blocks=[sequence.table(rank) for rank in range(settings.num_ranks)],
        kv_endpoints=request.kv_endpoints,
        num_kv_heads=ring.model.num_kv_heads,
        source_tp=settings.tp,
        destination_tp=request.tp,
    )
    calls = zip(ring.ranks, sends, strict=True)
    reports = await gather_all(port.send_kv(send, request.deadline_seconds) for port, send in calls)
    return SentKv(payload_bytes=sum(report.payload_bytes for report in reports), seconds=time.monotonic() - started)


async def fetch(
    ring: Ring,
    sequence: SequenceKv,
    source: KvSource,
    key: TransferKey,
    tokens: TokenRange,
    shards: ShardMap,
    deadline_seconds: float,
    *,
    turn_id: str = "",
) -> SentKv:
    """Have `tokens` sent to where `shards` lay them behind what the ranks hold; the sequence has the room.

    `turn_id` is of the turn that holds the sequence on the source, where one does. When this ends, however it does,
    none of the ring's ranks writes for the transfer any more. Raises what either side raised.
    """
    started = time.monotonic()
    held, control = sequence.shards.held, ring.settings.control_timeout
    expects = [KvExpect(key, shards.ranks[rank], held[rank], sequence.table(rank)) for rank in ring.cp_ranks]
    request = SendKv(
        transfer_id=key.transfer_id,
        attempt=key.attempt,
        sequence_id=sequence.sequence_id,
        turn_id=turn_id,
        source_incarnation=key.source,
        destination_incarnation=key.destination,
        tokens=tokens,
        shards=shards,
        kv_endpoints=ring.kv_endpoints,
        tp=ring.settings.tp,
        deadline_seconds=deadline_seconds,
    )
    try:
        await gather_all(port.expect_kv(expect, control) for port, expect in zip(ring.ranks, expects, strict=True))
        sent = await source.send_kv(request)
        await gather_first_error(port.await_kv(key, deadline_seconds) for port in ring.ranks)
    except BaseException:
        await _drop(ring, key)  # also when cancelled: no late byte may land in blocks that are about to be freed
        raise
    return SentKv(payload_bytes=sent.payload_bytes, seconds=time.monotonic() - started)


async def _drop(ring: Ring, key: TransferKey) -> None:
    """Return when no rank writes for the transfer, also where the caller is cancelled once more."""
    timeout = ring.settings.control_timeout
    dropping = asyncio.ensure_future(gather_all(port.drop_kv(key, timeout) for port in ring.ranks))
    is_cancelled = False
    while not dropping.done():
        try:
            await asyncio.wait([dropping])
        except asyncio.CancelledError:
            is_cancelled = True
    error = dropping.exception()
    if isinstance(error, RingserveError):
        # A rank that does not let go would write into blocks of others: the ring must not go on.
        ring.report_lost(error, key.destination)
    elif error is not None:
        raise error
    if is_cancelled:
        raise asyncio.CancelledError

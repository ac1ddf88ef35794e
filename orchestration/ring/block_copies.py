"""Has a ring's ranks make the block copies that a sequence needs before it is written."""

from __future__ import annotations

import asyncio

from cp_core.errors import RingserveError
from orchestration.ring.kv_pool import KvPool, SequenceKv
from orchestration.ring.life import Ring, gather_all
from workers.protocol.steps import BlockPair


async def copy_blocks(ring: Ring, pool: KvPool, sequence: SequenceKv, incarnation: str) -> None:
    """Return when the ranks have copied, also where the caller is cancelled meanwhile: a copy under way must not
    outlive the hold on its blocks. Every rank has the control timeout; one that fails loses its ring.

    Raises Unavailable.
    """
    if not sequence.copies:
        return
    ring.require_ready(incarnation)
    pairs: dict[int, list[BlockPair]] = {}
    for copy in sequence.copies:
        pairs.setdefault(copy.rank, []).append(BlockPair(source=copy.source, destination=copy.destination))
    timeout = ring.settings.control_timeout
    copying = asyncio.ensure_future(
        gather_all(
            port.copy_blocks(pairs[rank], timeout)
            for port, rank in zip(ring.ranks, ring.cp_ranks, strict=True)
            if rank in pairs
        )
    )
    is_cancelled = False
    while not copying.done():
        try:
            await asyncio.wait([copying])
        except asyncio.CancelledError:
            is_cancelled = True
    try:
        copying.result()
    except RingserveError as error:
        ring.report_lost(error, incarnation)
        raise
    pool.copied(sequence)
    if is_cancelled:
        raise asyncio.CancelledError

"""Kept KV on its way from a decode ring back to a prefill ring."""

from __future__ import annotations

import asyncio
import time

from orchestration.decode_turn import DecodeTurn
from orchestration.reshard_sends import sends_for
from orchestration.ring import Ring, gather_all
from orchestration.turn import SendKv, SentKv
from workers.steps import TransferKey


async def send_back(ring: Ring, turn: DecodeTurn, request: SendKv) -> SentKv:
    """Send what `request` names of the turn's sequence. `turn.pulls` holds the sends until the ranks have let go.

    Losing the caller does not end them. Raises TransferError, Unavailable.
    """
    started = time.monotonic()
    settings, sequence = ring.settings, turn.sequence
    key = TransferKey(request.transfer_id, request.attempt, request.source_incarnation, request.destination_incarnation)
    sends = sends_for(
        key,
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
    pull = asyncio.create_task(gather_all(port.send_kv(send, request.deadline_seconds) for port, send in calls))
    turn.pulls.add(pull)
    pull.add_done_callback(turn.pulls.discard)
    reports = await asyncio.shield(pull)
    return SentKv(payload_bytes=sum(report.payload_bytes for report in reports), seconds=time.monotonic() - started)

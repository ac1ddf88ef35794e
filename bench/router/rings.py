"""Rings that reserve at once and compute nothing, in the place of leaders.

The load and the restart of the router bench call them, and tests. A ring owns the record of what it retains.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import cache

from ringserve.cp_core.errors import NotFound, RingserveError
from ringserve.cp_core.layout.shards import ShardMap, spread
from ringserve.orchestration.protocol.turns import (
    Admit,
    ForkedKv,
    ForkKv,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    Reservation,
    Reserve,
    RetainedKv,
    RingRegistration,
    SendKv,
    SentKv,
    TakeKv,
    TakenKv,
    TurnEvent,
)
from ringserve.services.config.sections import DecodeConfig
from ringserve.views import RingInfo, RingRates

SIZES = (1, 2, 4, 8)
"""Ranks of the rings, in rotation."""


def registrations(
    num_rings: int, seed: int, endpoints: Mapping[tuple[str, int], str] | None = None
) -> tuple[RingRegistration, ...]:
    """Return what rings announce. Every second one is a decode ring; rates are the same within 10%.

    Each has an endpoint of its own, unless `endpoints` has one for each role and number of ranks.
    """
    draw, decode = random.Random(seed), DecodeConfig()

    def about(value: float) -> float:
        return value * draw.uniform(0.9, 1.1)

    def registration(number: int) -> RingRegistration:
        role, num_ranks = "decode" if number % 2 else "prefill", SIZES[number // 2 % len(SIZES)]
        return RingRegistration(
            role=role,
            name=f"{role}-{number // 2}",
            endpoint=endpoints[role, num_ranks] if endpoints else f"ring-{number}:1",
            incarnation="first",
            num_ranks=num_ranks,
            rates=RingRates(
                gemm_flops=about(4e14),
                attention_flops=about(3e14),
                link_bytes_per_second=about(2e10),
                link_latency_seconds=about(2e-5),
            ),
            capacity_tokens=1 << 28,
            free_tokens=1 << 28,
            spare_tokens=1 << 28,
            chunk_tokens=65_536,
            work_rate=1e6,
            max_batch=decode.max_batch,
            max_direct_tokens=decode.max_direct_tokens if role == "decode" else 0,
            max_direct_seconds=decode.max_direct_seconds if role == "decode" else 0.0,
        )

    return tuple(map(registration, range(num_rings)))


@cache
def _shards(start: int, count: int, num_ranks: int) -> ShardMap:
    """Return the shards of a run of tokens; cached, because in service leaders compute them, not the router."""
    return spread(start, count, (0,) * num_ranks)


class InstantRing:
    """Prefill and decode ring that retains all KV and finishes every request at once.

    `retained` are the tokens of each sequence. No KV moves, and no turn is decoded.
    """

    def __init__(self, registration: RingRegistration) -> None:
        self.registration = registration
        self.retained: dict[str, int] = {}

    async def reserve(self, request: Reserve) -> Reservation:
        retained = min(request.match_tokens, self.retained.get(request.shares or request.kv_id, 0))
        return Reservation(
            incarnation=self.registration.incarnation,
            retained_tokens=retained,
            shards=self.shards(request.num_tokens - retained, start=retained),
            kv_endpoints=(),
        )

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        return PrefillDone(report=PrefillReport(), shards=self.shards(len(turn.token_ids)))

    def shards(self, num_tokens: int, *, start: int = 0) -> ShardMap:
        """Return how the ring lays a run of tokens over its ranks."""
        return _shards(start, num_tokens, self.registration.num_ranks)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        if retain_tokens:
            self.retained[kv_id] = retain_tokens
        else:
            self.retained.pop(kv_id, None)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """Ignore the request: no turn of this ring runs."""

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        tokens = tuple(self.retained.get(name, 0) for name in kv_ids)
        return RetainedKv(incarnation=self.registration.incarnation, num_tokens=tokens)

    async def send_kv(self, request: SendKv) -> SentKv:
        raise NotFound("no KV moves")

    async def take_kv(self, request: TakeKv) -> TakenKv:
        raise NotFound("no KV moves")

    async def admit(self, admit: Admit) -> None:
        raise AssertionError("nothing is decoded")

    def stream_turn(self, turn_id: str, after: int = 0, interval: float = 0.0) -> AsyncGenerator[TurnEvent, None]:
        raise AssertionError("nothing is decoded")

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        raise AssertionError("nothing is decoded")

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        raise AssertionError("nothing is forked")

    async def drain(self, seconds: float) -> None:
        raise AssertionError("nothing drains")

    async def undrain(self) -> None:
        raise AssertionError("nothing drains")

    async def get_status(self) -> RingInfo:
        raise AssertionError("no status is asked for")


class InstantRings:
    """`Peers` that finds the rings of this process by endpoint."""

    def __init__(self, registrations: Sequence[RingRegistration]) -> None:
        self.rings = {each.endpoint: InstantRing(each) for each in registrations}

    def leader(self, role: str, endpoint: str) -> InstantRing:
        return self.rings[endpoint]

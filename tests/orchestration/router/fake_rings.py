"""Rings that obey a test: prompt, slow, full or gone. They know which turns they hold, and compute nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

from bench.router.rings import InstantRing
from ringserve.cp_core.errors import CapacityExceeded, NotFound, RingserveError, Unavailable
from ringserve.cp_core.layout.shards import ShardMap, spread
from ringserve.orchestration.protocol.turns import (
    PrefillDone,
    PrefillTurn,
    Reservation,
    Reserve,
    RetainedKv,
    RingRegistration,
)
from ringserve.views import RingRates

NUM_RANKS = 2
SLOW_SECONDS = 0.3


class Mood(Enum):
    """Moods of a ring, in which it takes the calls that come."""

    PROMPT = auto()
    SLOW = auto()
    FULL = auto()
    GONE = auto()


def shards(start: int, count: int) -> ShardMap:
    """Return how a ring lays a run of tokens over its ranks."""
    return spread(start, count, (0,) * NUM_RANKS)


class FakeRing(InstantRing):
    """Ring of either role. `held` are the turns that have reserved and were neither settled nor ended.

    `computed` are those whose prompt is on this decode ring. `was_gone`: a call may have failed to reach the ring.
    """

    def __init__(self, role: str, number: int, rings: Mapping[str, FakeRing]) -> None:
        rates = RingRates(gemm_flops=1e12, attention_flops=1e12, link_bytes_per_second=1e9, link_latency_seconds=1e-5)
        name = f"{role}-{number}"
        registration = RingRegistration(
            role=role,
            name=name,
            endpoint=name,
            incarnation=f"{name}-1",
            num_ranks=NUM_RANKS,
            rates=rates,
            capacity_tokens=1 << 20,
            chunk_tokens=1024,
            work_rate=1e6,
            max_batch=8,
        )
        super().__init__(registration)
        self._rings = rings
        self.role, self.name = role, name
        self.life = 1
        self.mood = Mood.PROMPT
        self.was_gone = False
        self.held: set[str] = set()
        self.computed: set[str] = set()
        self.on_aborted: Callable[[str], None] = lambda turn_id: None

    def be_born_again(self) -> None:
        """Lose everything, as a leader that was started again."""
        self.life += 1
        self.registration = replace(self.registration, incarnation=f"{self.name}-{self.life}")
        for kept in (self.held, self.computed, self.retained):
            kept.clear()

    def drop(self, turn_id: str) -> None:
        """Forget a turn."""
        self.held.discard(turn_id)
        self.computed.discard(turn_id)

    async def _take(self) -> None:
        if self.mood is Mood.GONE:
            self.was_gone = True
            raise Unavailable(f"ring {self.name} is gone")
        life = self.life
        if self.mood is Mood.SLOW:
            await asyncio.sleep(SLOW_SECONDS)
        if life != self.life:
            self.was_gone = True
            raise Unavailable(f"ring {self.name} was built again")

    async def reserve(self, request: Reserve) -> Reservation:
        await self._take()
        if self.mood is Mood.FULL:
            raise CapacityExceeded(f"ring {self.name} is full")
        self.held.add(request.turn_id)
        return await super().reserve(request)

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        await self._take()
        if turn.turn_id not in self.held:
            raise NotFound(f"turn {turn.turn_id} is not reserved on {self.name}")
        decode = self._rings[turn.decode_endpoint]
        if turn.turn_id not in decode.held:
            raise NotFound(f"turn {turn.turn_id} is not reserved on {decode.name}")
        decode.computed.add(turn.turn_id)
        return await super().prefill(turn)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        await self._take()
        if turn_id in self.held and self.role == "decode":
            self.drop(turn_id)
            self.on_aborted(turn_id)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        await self._take()
        self.held.discard(turn_id)
        await super().settle(kv_id, turn_id, retain_tokens)

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        await self._take()
        return await super().get_retained(kv_ids)


class FakeRings:
    """`Peers` of fake rings; an endpoint is the ring's name."""

    def __init__(self, num_prefill: int, num_decode: int) -> None:
        self.rings: dict[str, FakeRing] = {}
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for number in range(count):
                self.rings[f"{role}-{number}"] = FakeRing(role, number, self.rings)

    def leader(self, role: str, endpoint: str) -> FakeRing:
        return self.rings[endpoint]

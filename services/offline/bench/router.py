"""`ringserve bench router`: decisions a second of the real router, with rings that answer at once."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from cp_core.cost.model import RingRates
from cp_core.errors import RingserveError
from cp_core.layout.shards import ShardMap, spread
from orchestration.placement.planner import Planner, PlannerSettings
from orchestration.protocol.kv import ForkedKv, ForkKv, RetainedKv, SendKv, SentKv, TakeKv, TakenKv
from orchestration.protocol.turns import (
    Admit,
    PrefillDone,
    PrefillReport,
    PrefillTurn,
    PromptMode,
    Reservation,
    Reserve,
    RingRegistration,
    TurnEvent,
    TurnOutcome,
    TurnRequest,
)
from orchestration.protocol.views import RingStatus
from orchestration.router.router import Router, RouterSettings
from services.config.rings import DecodeConfig
from workers.protocol.prefill_steps import Algorithm, TokenIds
from workers.protocol.ranks import ModelInfo
from workers.sampling.parameters import SamplingParameters

INCARNATION = "first"
VOCABULARY = 32_000
MEMORY_SAMPLE = 100
"""Conversations in the measurement of memory, whose tracing is slow."""
SIZES = (1, 2, 4, 8)
"""Ranks of the rings, in rotation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLoad:
    """Load of the router: `turns` turns in each conversation, the first of `tokens` tokens, the others of `follow_up`.

    Half of the `rings` are prefill rings; their sizes and rates differ.
    """

    conversations: int = 10_000
    rings: int = 200
    turns: int = 2
    tokens: int = 1000
    follow_up: int = 50
    answer: int = 20
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Distribution of durations, in milliseconds."""

    mean: float
    p50: float
    p99: float
    most: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterReport:
    """Report of the router bench.

    `decision` is a whole `begin_turn`: matching, placement, reservations and the plan. `processor` is its processor
    time, which other work on the machine hardly lengthens. `placement` is the choice of rings alone. `kept_share` is
    the share of follow-ups on the rings of the turn before, `direct_share` the share that the decode ring computes.
    Garbage collection pauses all lie within turns. Bytes are those of an idle
    conversation; `token_bytes_per_conversation` counts its token ids, 8 bytes each.
    """

    decisions: int
    rings: int
    conversations: int
    decisions_per_second: float
    decision: Spread
    processor: Spread
    placement: Spread
    num_pauses: int
    longest_pause: float
    pauses_share: float
    kept_share: float
    direct_share: float
    rings_used: int
    bytes_per_conversation: float
    token_bytes_per_conversation: float


@cache
def _shards(start: int, count: int, num_ranks: int) -> ShardMap:
    """Return the shards of a run of tokens; they are cached, since a ring's leader computes them in service."""
    return spread(start, count, (0,) * num_ranks)


class InstantRing:
    """Prefill and decode ring that retains all KV and finishes every request at once."""

    def __init__(self, registration: RingRegistration) -> None:
        self.registration = registration
        self._retained: dict[str, int] = {}

    async def reserve(self, request: Reserve) -> Reservation:
        retained = min(request.match_tokens, self._retained.get(request.kv_id, 0))
        ranks = self.registration.num_ranks
        return Reservation(
            incarnation=INCARNATION,
            retained_tokens=retained,
            shards=_shards(retained, request.num_tokens - retained, ranks),
            kv_endpoints=(),
        )

    async def prefill(self, turn: PrefillTurn) -> PrefillDone:
        return PrefillDone(report=PrefillReport(), shards=self.shards(len(turn.token_ids)))

    def shards(self, num_tokens: int) -> ShardMap:
        return _shards(0, num_tokens, self.registration.num_ranks)

    async def settle(self, kv_id: str, turn_id: str, retain_tokens: int) -> None:
        if retain_tokens:
            self._retained[kv_id] = retain_tokens
        else:
            self._retained.pop(kv_id, None)

    async def abort_turn(self, turn_id: str, error: RingserveError) -> None:
        """Ignore the request: no turn of this ring runs."""

    async def admit(self, admit: Admit) -> None:
        raise AssertionError("no prefill ring of this bench admits anything")

    async def finish_turn(self, turn_id: str, num_tokens: int) -> None:
        raise AssertionError("no turn of this bench has stop strings")

    async def send_kv(self, request: SendKv) -> SentKv:
        raise AssertionError("no prefill ring of this bench pulls")

    async def take_kv(self, request: TakeKv) -> TakenKv:
        raise AssertionError("no ring of this bench drains or is full")

    async def fork_kv(self, request: ForkKv) -> ForkedKv:
        raise AssertionError("no conversation of this bench is forked")

    async def get_retained(self, kv_ids: Sequence[str]) -> RetainedKv:
        return RetainedKv(incarnation=INCARNATION, num_tokens=tuple(self._retained.get(name, 0) for name in kv_ids))

    async def drain(self, seconds: float) -> None:
        raise AssertionError("no ring of this bench is drained")

    async def undrain(self) -> None:
        raise AssertionError("no ring of this bench is drained")

    async def get_status(self) -> RingStatus:
        raise AssertionError("no ring of this bench is asked for its status")

    def stream_turn(self, turn_id: str) -> AsyncGenerator[TurnEvent, None]:
        raise AssertionError("no turn of this bench is streamed")


class InstantRings:
    """Registry of the bench's rings, in the place of the router's `Peers`."""

    def __init__(self, registrations: Sequence[RingRegistration]) -> None:
        self.rings = {each.endpoint: InstantRing(each) for each in registrations}

    def leader(self, role: str, endpoint: str) -> InstantRing:
        return self.rings[endpoint]


def measure_router(model: ModelInfo, load: RouterLoad, tell: Callable[[str], None]) -> RouterReport:
    """Run the load, then a part of it with its memory traced; `tell` is called for every turn."""
    bench = _Bench(model, load)
    with _Pauses() as pauses:
        asyncio.run(bench.run(load.conversations, tell))
    sample = _Bench(model, load)
    gc.collect()
    tracemalloc.start()
    count = min(MEMORY_SAMPLE, load.conversations)
    asyncio.run(sample.run(1, lambda name: None, first=count))  # memory that every router has
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    asyncio.run(sample.run(count, lambda name: None))
    sample.forget_figures()
    gc.collect()
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    tokens = load.tokens + (load.turns - 1) * load.follow_up + load.turns * load.answer
    seconds = bench.seconds
    return RouterReport(
        decisions=len(seconds),
        rings=load.rings,
        conversations=load.conversations,
        decisions_per_second=len(seconds) / sum(seconds),
        decision=_spread_of(seconds),
        processor=_spread_of(bench.processor_seconds),
        placement=_spread_of(bench.placement_seconds),
        num_pauses=len(pauses.seconds),
        longest_pause=1e3 * max(pauses.seconds, default=0.0),
        pauses_share=sum(pauses.seconds) / bench.whole_seconds,
        kept_share=bench.num_on_same_rings / max(1, bench.num_follow_ups),
        direct_share=bench.num_direct / max(1, bench.num_follow_ups),
        rings_used=len(bench.rings_used),
        bytes_per_conversation=num_bytes / count,
        token_bytes_per_conversation=8.0 * tokens,
    )


class _Pauses:
    """Durations of each garbage collection within the context, in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def __enter__(self) -> _Pauses:
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)


class _Bench:
    """Router under load, with its measurements."""

    def __init__(self, model: ModelInfo, load: RouterLoad) -> None:
        self._load = load
        self._draw = random.Random(load.seed)
        self._ids = np.random.default_rng(load.seed)
        self._registrations = [self._registration(number) for number in range(load.rings)]
        self._peers = InstantRings(self._registrations)
        settings = RouterSettings(max_conversations=load.conversations + 1, max_positions=1 << 30)
        self._router = Router(settings, Planner(model, PlannerSettings()), self._peers)
        self._where: dict[str, tuple[str, str]] = {}
        self.forget_figures()

    def forget_figures(self) -> None:
        """Release the memory of the bench itself."""
        self.seconds: list[float] = []
        self.processor_seconds: list[float] = []
        self.whole_seconds = 0.0
        self.placement_seconds: list[float] = []
        self.rings_used: set[str] = set()
        self.num_on_same_rings = self.num_direct = self.num_follow_ups = 0
        self._where.clear()
        for ring in self._peers.rings.values():
            ring._retained.clear()

    def _registration(self, number: int) -> RingRegistration:
        def about(value: float) -> float:
            return value * self._draw.uniform(0.9, 1.1)

        role = "decode" if number % 2 else "prefill"
        decode = DecodeConfig()
        return RingRegistration(
            role=role,
            name=f"{role}-{number // 2}",
            endpoint=f"ring-{number}:1",
            incarnation=INCARNATION,
            num_ranks=SIZES[number // 2 % len(SIZES)],
            rates=RingRates(
                gemm_flops=about(4e14),
                attention_flops=about(3e14),
                link_bytes_per_second=about(2e10),
                link_latency_seconds=about(2e-5),
            ),
            capacity_tokens=1 << 28,
            chunk_tokens=65_536,
            work_rate=1e6,
            max_batch=decode.max_batch,
            max_direct_tokens=decode.max_direct_tokens if role == "decode" else 0,
            max_direct_seconds=decode.max_direct_seconds if role == "decode" else 0.0,
        )

    async def run(self, count: int, tell: Callable[[str], None], *, first: int = 0) -> None:
        """Run all turns of `count` conversations, one turn of each a round; all conversations but one are idle."""
        for registration in self._registrations:
            await self._router.register_ring(registration)
        choose = self._router.placer.choose

        def timed(wanted: object) -> object:
            began = time.perf_counter()
            choice = choose(wanted)  # type: ignore[arg-type]
            self.placement_seconds.append(time.perf_counter() - began)
            return choice

        self._router.placer.choose = timed  # type: ignore[method-assign, assignment]
        started = time.perf_counter()
        for turn in range(self._load.turns):
            for number in range(first, first + count):
                await self._turn(f"conversation-{number}", turn)
                tell(f"turn {turn + 1} of each conversation")
        self.whole_seconds = time.perf_counter() - started
        self._router.placer.choose = choose  # type: ignore[method-assign]
        await self._router.close()

    async def _turn(self, name: str, turn: int) -> None:
        load = self._load
        new = self._tokens(load.follow_up if turn else load.tokens)
        request = TurnRequest(
            request_id=f"{name}/{turn}",
            conversation_id=name,
            prompt_mode=PromptMode.APPEND if turn else PromptMode.WHOLE_HISTORY,
            token_ids=new,
            sampling=SamplingParameters(temperature=0.0, seed=0, max_tokens=load.answer, stop_token_ids=()),
            deadline_seconds=60.0,
        )
        began, computing = time.perf_counter(), time.thread_time()
        begun = await self._router.begin_turn(request)
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(time.thread_time() - computing)
        plan = begun.plan
        self.rings_used.update((plan.prefill_ring, plan.decode_ring))
        is_direct = plan.algorithm is Algorithm.DECODE_RING
        before = self._where.get(name, ("", ""))
        # A turn that its decode ring computes leaves the KV on the prefill ring.
        where = before[0] if is_direct else plan.prefill_ring, plan.decode_ring
        if turn:
            self.num_follow_ups += 1
            self.num_on_same_rings += where == before
            self.num_direct += is_direct
        self._where[name] = where
        ring = self._peers.leader("decode", begun.decode_endpoint)
        kv_tokens = begun.prompt_tokens + load.answer - 1
        outcome = TurnOutcome(
            turn_id=begun.turn_id,
            ok=True,
            token_ids=tuple(self._tokens(load.answer).tolist()),
            kv_tokens=kv_tokens,
            shards=ring.shards(kv_tokens),
        )
        await ring.settle(name, begun.turn_id, await self._router.end_turn(outcome))

    def _tokens(self, count: int) -> TokenIds:
        return self._ids.integers(0, VOCABULARY, count)


def _spread_of(seconds: Sequence[float]) -> Spread:
    p50, p99 = (1e3 * float(value) for value in np.percentile(seconds, (50, 99)))
    return Spread(mean=1e3 * float(np.mean(seconds)), p50=p50, p99=p99, most=1e3 * max(seconds))

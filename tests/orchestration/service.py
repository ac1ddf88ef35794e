"""Whole service in one process: real router, leaders and ranks, with threads for Ray and calls for gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringserve.cp_core.cost.profile import HardwareProfile
from ringserve.cp_core.cost.sparse import SparseLosses
from ringserve.cp_core.errors import Unavailable
from ringserve.orchestration.decode.leader import DecodeLeader
from ringserve.orchestration.journal.journal import SqliteJournal
from ringserve.orchestration.placement.planner import Planner, PlannerSettings
from ringserve.orchestration.prefill.leader import PrefillLeader
from ringserve.orchestration.protocol.inventory import UNKNOWN_EPOCH, KnownEpoch, Registered
from ringserve.orchestration.protocol.plans import Bound, PromptMode
from ringserve.orchestration.protocol.rings import HEARTBEAT_SECONDS, PrefillScheduling, RingSettings
from ringserve.orchestration.protocol.turns import (
    BegunTurn,
    EndingEvent,
    FinishedEvent,
    PrefillReport,
    RingRegistration,
    ScoredEvent,
    TokensEvent,
    TurnRequest,
)
from ringserve.orchestration.router.router import Router, RouterSettings
from ringserve.views import RingRates
from ringserve.workers.model.info import read_model_info
from ringserve.workers.protocol.ranks import RankSettings
from ringserve.workers.protocol.steps import Algorithm
from ringserve.workers.sampling.parameters import SamplingParameters, TokenLogprobs
from tests.one_core import on_one_core
from tests.waiting import WAIT_SECONDS, eventually
from tests.workers.thread_ranks import RATES, ThreadRanks

BLOCK_TOKENS = 4
TIMEOUT = 2 * WAIT_SECONDS
"""Seconds of every timeout of the service: what a test waits for must not come about by one."""
QUIET = 3600.0
"""`heartbeat` of rings that announce themselves when a test says so."""
Shape = int | tuple[int, int]
"""Ranks of a ring; or (ranks, processes a rank)."""


@dataclass(frozen=True)
class Answer:
    """Finished turn."""

    token_ids: list[int]
    begun: BegunTurn
    report: PrefillReport
    finished: FinishedEvent
    logprobs: list[TokenLogprobs]
    prompt_logprobs: tuple[TokenLogprobs, ...]


class DirectPeers:
    """Fake of `Peers` by plain reference; an endpoint is the ring's name."""

    def __init__(self) -> None:
        self.leaders: dict[str, PrefillLeader | DecodeLeader] = {}

    def leader(self, role: str, endpoint: str) -> Any:
        leader = self.leaders[endpoint]
        assert leader.settings.role == role
        return leader

    def decode(self, endpoint: str) -> DecodeLeader:
        """Return a decode ring's leader as it is, not only as its port."""
        leader = self.leaders[endpoint]
        assert isinstance(leader, DecodeLeader)
        return leader


class NoRouter:
    """Router that is down."""

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def fail(*arguments: object, **options: object) -> None:
            raise Unavailable("the router cannot be reached")

        return fail


class PresentRouter:
    """Port to the router that runs at the moment of a call."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def register_ring(self, ring: RingRegistration, known: KnownEpoch = UNKNOWN_EPOCH) -> Registered:
        return await self._service.router.register_ring(ring, known)

    def __getattr__(self, verb: str) -> Any:
        async def call(*arguments: object, **options: object) -> Any:
            return await getattr(self._service.router, verb)(*arguments, **options)

        return call


class Service:
    """Async context with rings of `num_prefill` and `num_decode` ranks, and NaN in every unwritten KV slot."""

    def __init__(
        self,
        model_path: Path,
        num_prefill: int,
        num_decode: int,
        *,
        selector: str = "auto",
        missing_kv: str = "pull",
        profile: HardwareProfile | None = None,
        kept_fraction: float = 1.0,
        max_waiting_turns: int = 64,
        conversation_ttl: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        journal: Path | None = None,
        num_blocks: int = 2048,
        chunk_tokens: int = 4096,
        max_batch: int = 8,
        max_waiting: int = 256,
        decode_blocks: int | None = None,
        headroom_tokens: int = 128,
        max_direct_tokens: int = 0,
        retain_prompts: bool = False,
        share_prompts: tuple[tuple[str, ...], ...] = (),
        max_direct_seconds: float = 10.0,
        prefill_tp: int = 1,
        decode_tp: int = 1,
        decode_variant: str = "auto",
        scheduling: PrefillScheduling | None = None,
        other_prefill: Sequence[Shape] = (),
        other_decode: Sequence[Shape] = (),
        ring_lease: float = 0.0,
        orphan_timeout: float = 0.0,
        rates: RingRates = RATES,
        sparse_losses: SparseLosses | None = None,
        bound: Bound | None = None,
        heartbeat: float = HEARTBEAT_SECONDS,
    ) -> None:
        """Set up the rings. `other_prefill` and `other_decode` are further ones: prefill-1, decode-1 and so on.

        Given by their ranks alone they have as many processes a rank as the first of their role.
        """
        self.model = read_model_info(model_path)
        self.peers = DirectPeers()
        self._planner = Planner(
            self.model,
            PlannerSettings(selector=selector, missing_kv=missing_kv, profile=profile),
        )
        router_settings = RouterSettings(
            max_positions=self.model.max_positions,
            max_waiting_turns=max_waiting_turns,
            conversation_ttl=conversation_ttl,
            ring_lease=ring_lease,
            retain_prompts=retain_prompts,
            share_prompts=share_prompts,
            num_rings=2 + len(other_prefill) + len(other_decode),
            sparse_losses=sparse_losses,
            bound=bound,
            control_timeout=TIMEOUT,
            transfer_timeout=TIMEOUT,
        )
        self._journal, self._router_settings, self._clock = journal, router_settings, clock
        self.router = self._new_router()
        self.prefill_ranks = ThreadRanks(poisoned=True, rates=rates)
        self.decode_ranks = ThreadRanks(poisoned=True, rates=rates)

        def settings(role: str, num_ranks: int, tp: int, number: int = 0) -> RingSettings:
            return RingSettings(
                role=role,
                name=f"{role}-{number}",
                num_ranks=num_ranks,
                kept_fraction=kept_fraction,
                chunk_tokens=chunk_tokens,
                max_waiting=max_waiting,
                prefill_scheduling=scheduling or PrefillScheduling(),
                headroom_tokens=headroom_tokens,
                orphan_timeout=orphan_timeout,
                max_direct_tokens=max_direct_tokens,
                max_direct_seconds=max_direct_seconds,
                control_timeout=TIMEOUT,
                transfer_timeout=TIMEOUT,
                stuck_timeout=TIMEOUT,
                attach_timeout=TIMEOUT,
                lost_timeout=TIMEOUT,
                announce_interval=heartbeat,
                ranks=RankSettings(
                    tp=tp,
                    model_path=str(model_path),
                    num_blocks=num_blocks if decode_blocks is None or role == "prefill" else decode_blocks,
                    block_tokens=BLOCK_TOKENS,
                    max_batch=max_batch,
                    decode_variant=decode_variant,
                ),
            )

        router = PresentRouter(self)
        register = router.register_ring
        self.prefill = PrefillLeader(
            settings("prefill", num_prefill, prefill_tp), self.prefill_ranks, self.peers, register
        )
        self.decode = DecodeLeader(
            settings("decode", num_decode, decode_tp), self.decode_ranks, self.peers, router, register
        )
        self.peers.leaders = {"prefill-0": self.prefill, "decode-0": self.decode}
        for number, shape in enumerate(other_prefill, start=1):
            self.peers.leaders[f"prefill-{number}"] = PrefillLeader(
                settings("prefill", *_shape(shape, prefill_tp), number),
                ThreadRanks(poisoned=True, rates=rates),
                self.peers,
                register,
            )
        for number, shape in enumerate(other_decode, start=1):
            self.peers.leaders[f"decode-{number}"] = DecodeLeader(
                settings("decode", *_shape(shape, decode_tp), number),
                ThreadRanks(poisoned=True, rates=rates),
                self.peers,
                router,
                register,
            )
        self._numbers = itertools.count()
        self._core = ExitStack()

    async def __aenter__(self) -> Self:
        with ExitStack() as core:
            core.enter_context(on_one_core())
            # Among equal rings a turn takes the first registered one, and rings of a role register by number.
            await asyncio.gather(self._start("prefill"), self._start("decode"))
            self._core = core.pop_all()
        return self

    def _new_router(self) -> Router:
        journal = SqliteJournal(self._journal) if self._journal is not None else None
        return Router(self._router_settings, self._planner, self.peers, self._clock, journal)

    async def crash_router(self) -> None:
        """End the router as a crash does: it says nothing to anybody, and calls to it fail."""
        crashed, self.router = self.router, NoRouter()  # type: ignore[assignment]
        for turn in crashed._turns._running.values():  # its calls end with it
            for task in (turn.attempt.prefilling, turn.attempt.resuming):
                if task is not None:
                    task.cancel()
            if turn.lease is not None:
                turn.lease.cancel()
        await crashed.close()

    def start_router(self) -> None:
        """Start a router on the same journal."""
        self.router = self._new_router()
        self.router.restore()

    async def _start(self, role: str) -> None:
        for name, leader in self.peers.leaders.items():
            if leader.settings.role == role:
                await leader.start(name)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._core:
            await asyncio.gather(*(leader.close() for leader in self.peers.leaders.values()))
            if isinstance(self.router, Router):
                await self.router.close()

    def select(self, selector: str) -> None:
        """Choose another selector for the turns that follow."""
        self._planner.selector = selector

    def request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 5,
        conversation: str = "",
        mode: PromptMode = PromptMode.WHOLE_HISTORY,
        temperature: float = 0.0,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        deadline: float = WAIT_SECONDS,
        wait: bool = False,
        ttl: float | None = None,
        sampling: SamplingParameters | None = None,
        priority: int = 0,
        algorithm: Algorithm | None = None,
        bound: Bound | None = None,
    ) -> TurnRequest:
        """Return a request. `sampling` replaces the four arguments that are part of it."""
        return TurnRequest(
            request_id=f"request-{next(self._numbers)}",
            conversation_id=conversation,
            prompt_mode=mode,
            token_ids=np.asarray(prompt, dtype=np.int64),
            sampling=sampling
            or SamplingParameters(
                temperature=temperature, seed=seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids
            ),
            deadline_seconds=deadline,
            conversation_ttl_seconds=ttl,
            wait=wait,
            priority=priority,
            algorithm=algorithm,
            bound=bound,
        )

    async def answer(self, request: TurnRequest, *, finish_after: int | None = None) -> Answer:
        """Run one turn to its end, as a gateway does; finish it after so many tokens where the text ends it."""
        begun = await self.router.begin_turn(request)
        decode = self.peers.decode(begun.decode_endpoint)
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        scores: tuple[TokenLogprobs, ...] = ()
        report: PrefillReport | None = None
        async with aclosing(decode.stream_turn(begun.turn_id)) as events:
            async for event in events:
                if isinstance(event, PrefillReport):
                    report = event
                elif isinstance(event, TokensEvent):
                    tokens.extend(event.token_ids)
                    logprobs.extend(event.logprobs)
                    # An event may bring several tokens at once, and more come while the ring hears of the end.
                    if finish_after is not None and len(tokens) - len(event.token_ids) < finish_after <= len(tokens):
                        await decode.finish_turn(begun.turn_id, finish_after)
                elif isinstance(event, ScoredEvent):
                    scores = event.logprobs
                elif isinstance(event, EndingEvent):
                    await decode.finish_turn(begun.turn_id, len(tokens))
                else:
                    assert report is not None
                    return Answer(tokens[:finish_after], begun, report, event, logprobs[:finish_after], scores)
        raise AssertionError("the stream ended without a finish")

    def free_blocks(self) -> list[int]:
        """Return the free KV blocks of every rank of all rings."""
        return [rank.free_blocks for leader in self.peers.leaders.values() for rank in leader.ring.pool.usage()]

    def check_integrity(self) -> None:
        for leader in self.peers.leaders.values():
            leader.ring.pool.check_integrity()


def _shape(shape: Shape, tp: int) -> tuple[int, int]:
    return (shape, tp) if isinstance(shape, int) else shape


async def is_idle(service: Service, free: list[int]) -> None:
    await eventually(lambda: service.free_blocks() == free)
    service.check_integrity()


async def read_tokens(service: Service, request: TurnRequest, count: int) -> None:
    """Begin a turn, read `count` tokens of it, hang up."""
    begun = await service.router.begin_turn(request)
    seen = 0
    async with aclosing(service.peers.decode(begun.decode_endpoint).stream_turn(begun.turn_id)) as events:
        while seen < count:
            event = await anext(events)
            seen += len(event.token_ids) if isinstance(event, TokensEvent) else 0

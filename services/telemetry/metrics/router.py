"""Router metrics: plans, which the router's servicer counts, and the rings and conversations that the router knows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Counted
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ringserve.cp_core.cost.selector import POLICIES
from ringserve.cp_core.errors import RingserveError
from ringserve.orchestration.protocol.plans import MAX_LOSS, MAX_TTFT
from ringserve.orchestration.protocol.rings import RingStanding
from ringserve.orchestration.protocol.turns import BegunTurn
from ringserve.orchestration.protocol.views import MoveReason
from ringserve.services.telemetry.metrics.gateway import ALGORITHMS
from ringserve.services.telemetry.metrics.registry import CONTROL, new_registry
from ringserve.services.telemetry.metrics.ring import SCRAPE_SECONDS
from ringserve.views import KvMoves

log = logging.getLogger(__name__)

ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class RouterView:
    """Current state of the router.

    `rings` are (role, name, state) of all configured rings. `corrections` are (ring, algorithm, least work of the turns
    that the correction is for, factor by which predictions for such turns are multiplied). `prefix_tokens` are two
    counts: tokens of new prompts that were looked up among earlier prompts, and how many of them had KV.
    """

    conversations: int
    unnamed_conversations: int = 0
    prefix_tokens: tuple[int, int] = (0, 0)
    running_turns: int
    turns_waiting_for_rings: int = 0
    rings: tuple[tuple[str, str, RingStanding], ...] = ()
    corrections: tuple[tuple[str, str, int, float], ...] = ()
    moves: tuple[KvMoves, ...] = ()


class RouterMetrics:
    """Series of the router process. Each scrape calls `view` in `loop`, so that no state is half changed."""

    def __init__(self, selector: str, view: Callable[[], RouterView], loop: asyncio.AbstractEventLoop) -> None:
        registry = self.registry = new_registry("router")
        self._selector = selector if selector in POLICIES else "other"
        self._plans = Counter(
            "ringserve_router_plans",
            "Planned turns by algorithm and by the policy that chose it.",
            ["algorithm", "selector"],
            registry=registry,
        )
        for algorithm in ALGORITHMS:
            self._plans.labels(algorithm, self._selector)
        self._sparse = Counter(
            "ringserve_router_sparse_plans",
            "Planned turns that are approximate, by the bound that they were chosen for.",
            ["bound"],
            registry=registry,
        )
        for bound in (MAX_LOSS, MAX_TTFT):
            self._sparse.labels(bound)
        self._placements = Counter(
            "ringserve_router_placements", "Planned turns by their rings.", ["role", "ring"], registry=registry
        )
        self._refusals = Counter("ringserve_router_refusals", "Turns that got no plan.", registry=registry)
        self._planning = Histogram(
            "ringserve_router_begin_turn_seconds",
            "Time from a turn's request to its plan, including the reservations on both rings.",
            buckets=CONTROL,
            registry=registry,
        )
        registry.register(_RouterCollector(view, loop))

    async def planned(self, planning: Awaitable[BegunTurn]) -> BegunTurn:
        """Await a plan, counting and timing it."""
        started = time.monotonic()
        try:
            begun = await planning
        except RingserveError:
            self._refusals.inc()
            raise
        self._planning.observe(time.monotonic() - started)
        plan = begun.plan
        self._plans.labels(plan.algorithm.value, self._selector).inc()
        if plan.sparse is not None:
            self._sparse.labels(plan.sparse.bound).inc()
        for role, ring in zip(ROLES, (plan.prefill_ring, plan.decode_ring), strict=True):
            self._placements.labels(role, ring).inc()
        return begun


def _states(rings: Sequence[tuple[str, str, RingStanding]]) -> Metric:
    """Return the number of rings in each state. Every role and state is there: an alert on a sum needs its zero."""
    found = Counted((role, state) for role, _, state in rings)
    states = GaugeMetricFamily("ringserve_rings", "Configured rings by state.", labels=("role", "state"))
    for role, state in product(ROLES, RingStanding):
        states.add_metric((role, state), found[role, state])
    return states


MOVE = ("role", "reason")


def _moves(totals: Sequence[KvMoves]) -> Iterator[Metric]:
    """Yield the counters of moves, with every pair of labels present: the rate of an event that never happened is 0."""
    found = {(each.role, each.reason): each for each in totals}
    moved = "Retained KV that moved between rings, by the role of the ring it left and the reason"
    moves = CounterMetricFamily("ringserve_router_kv_moves", f"{moved}.", labels=(*MOVE, "outcome"))
    num_bytes = CounterMetricFamily("ringserve_router_kv_moved_bytes", f"{moved}: bytes.", labels=MOVE)
    seconds = CounterMetricFamily("ringserve_router_kv_move_seconds", f"{moved}: seconds under way.", labels=MOVE)
    for role, reason in product(ROLES, MoveReason):
        each = found.get((role, reason))
        moves.add_metric((role, reason, "moved"), each.moved if each else 0)
        moves.add_metric((role, reason, "failed"), each.failed if each else 0)
        num_bytes.add_metric((role, reason), each.payload_bytes if each else 0)
        seconds.add_metric((role, reason), each.seconds if each else 0)
    yield from (moves, num_bytes, seconds)


class _RouterCollector(Collector):
    def __init__(self, view: Callable[[], RouterView], loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        try:
            view = asyncio.run_coroutine_threadsafe(self._ask(), self._loop).result(SCRAPE_SECONDS)
        except Exception as error:  # a scrape must be answered; the missing series raise an alert
            log.warning("the router cannot tell its state: %s", error or type(error).__name__)
            return
        yield GaugeMetricFamily("ringserve_conversations", "Conversations remembered.", view.conversations)
        unnamed = "Histories of requests without a conversation, whose KV may be shared."
        yield GaugeMetricFamily("ringserve_unnamed_conversations", unnamed, view.unnamed_conversations)
        queried, hit = view.prefix_tokens
        looked = "Tokens of prompts without a history that were looked up among earlier prompts"
        yield CounterMetricFamily("ringserve_router_prefix_queries", f"{looked}.", queried)
        yield CounterMetricFamily("ringserve_router_prefix_hits", f"{looked} and whose KV was found.", hit)
        yield GaugeMetricFamily("ringserve_router_running_turns", "Turns begun and not ended.", view.running_turns)
        yield GaugeMetricFamily(
            "ringserve_router_turns_waiting_for_rings",
            "Turns that wait for a ring that restarts.",
            view.turns_waiting_for_rings,
        )
        rings = GaugeMetricFamily("ringserve_router_ring_ready", "1 if turns go to the ring.", labels=("role", "ring"))
        for role, name, state in view.rings:
            if state is not RingStanding.AWAY:  # somebody has drained it: no fault of the ring
                rings.add_metric((role, name), float(state is RingStanding.READY))
        yield rings
        yield _states(view.rings)
        corrections = GaugeMetricFamily(
            "ringserve_router_prediction_correction",
            "Median of measured over predicted prefill seconds of a ring's latest turns of like work.",
            labels=("ring", "algorithm", "min_work"),
        )
        for name, algorithm, min_work, factor in view.corrections:
            corrections.add_metric((name, algorithm, str(min_work)), factor)
        yield corrections
        yield from _moves(view.moves)

    async def _ask(self) -> RouterView:
        return self._view()

"""Metrics of a ring and of its ranks, served by the ring's leader: ranks have no HTTP server.

Used by `services.cluster.hosts`, which starts leaders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ringserve.cp_core.cost.decode import VARIANT_POLICIES
from ringserve.orchestration.protocol.plans import LayoutFallback
from ringserve.orchestration.protocol.rings import RingState
from ringserve.orchestration.ring.kv_pool import PARTS
from ringserve.orchestration.ring.leader import RingLeader
from ringserve.views import RingInfo
from ringserve.workers.protocol.ranks import STEP_BOUNDS, RankStatus

log = logging.getLogger(__name__)

SCRAPE_SECONDS = 5.0
"""Seconds within which a leader's event loop must answer; otherwise the ring is reported as not ready."""
RING = ("role", "ring")
RANK = (*RING, "rank")
DECODE_VARIANTS = tuple(policy for policy in VARIANT_POLICIES if policy != "auto")


@dataclass(frozen=True, kw_only=True)
class RingView:
    """Current state of a ring: its public status, and figures that only its leader knows, such as its evictions."""

    status: RingInfo
    rank_statuses: tuple[RankStatus, ...]
    kv_evictions: Mapping[str, int]
    layout_fallbacks: Mapping[str, int]
    kv_shared_tokens: int
    kv_bytes_per_token: int
    kv_block_tokens: int


async def view_of(leader: RingLeader) -> RingView:
    """Return the state of a leader's ring. Statuses of ranks are about a second old."""
    statuses = leader.ring.rank_statuses
    return RingView(
        status=await leader.get_status(),
        rank_statuses=tuple(statuses[number] for number in sorted(statuses)),
        kv_evictions=leader.ring.pool.evictions,
        layout_fallbacks=leader.layout_fallbacks,
        kv_shared_tokens=leader.ring.pool.shared_tokens,
        kv_bytes_per_token=leader.ring.model.kv_bytes_per_token,
        kv_block_tokens=leader.ring.pool.block_tokens,
    )


class RingCollector(Collector):
    """Collector of a ring's series. It reads them in the leader's event loop, so that no state is half changed."""

    def __init__(
        self, role: str, ring: str, get_view: Callable[[], Awaitable[RingView]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._labels = (role, ring)
        self._get_view = get_view
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Yield the series of the ring; for a ring that does not answer, only that it is not ready."""
        try:
            asked = asyncio.run_coroutine_threadsafe(self._ask(), self._loop)
            view = asked.result(SCRAPE_SECONDS)
        except Exception as error:  # a scrape must be answered, and "not ready" raises an alert
            log.warning("ring %s cannot tell its state: %s", self._labels[1], error or type(error).__name__)
            yield _gauge("ring_ready", "1 while the ring serves.", RING, [(self._labels, 0.0)])
            return
        yield from self._of_ring(view)
        yield from self._of_ranks(view)

    async def _ask(self) -> RingView:
        return await self._get_view()

    def _of_ring(self, view: RingView) -> Iterator[Metric]:
        own, status = self._labels, view.status
        total = sum(rank.total_blocks for rank in status.kv_usage)
        active = sum(rank.active_blocks for rank in status.kv_usage)
        is_ready = float(status.state == RingState.READY)
        yield _gauge("ring_ready", "1 while the ring serves.", RING, [(own, is_ready)])
        yield _gauge("ring_ranks", "Ranks that share a prompt's tokens.", RING, [(own, status.num_ranks)])
        yield _gauge("num_requests_running", "Turns being computed.", RING, [(own, status.num_requests_running)])
        yield _gauge("num_requests_waiting", "Turns that wait.", RING, [(own, status.num_requests_waiting)])
        yield _gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks that running turns use, from 0 to 1.",
            RING,
            [(own, active / total if total else 0)],
        )
        # These are vLLM's labels: tools made for vLLM compute from them how many tokens the ring can hold.
        cache = ((*own, str(view.kv_block_tokens), str(total)), 1.0)
        told = "Always 1; tokens of a KV block and the blocks of all ranks are in the labels."
        yield _gauge("cache_config_info", told, (*RING, "block_size", "num_gpu_blocks"), [cache])
        yield _counter("ring_rebuilds", "Times the ring was lost and made again.", RING, [(own, status.rebuilds)])
        yield _counter(
            "kv_evictions",
            "Retained sequences evicted for others, wholly or their end alone, since the last rebuild.",
            (*RING, "part"),
            [((*own, part), view.kv_evictions.get(part, 0)) for part in PARTS],
        )
        shared = view.kv_shared_tokens * view.kv_bytes_per_token
        yield _gauge("kv_shared_bytes", "Bytes of KV that sharing between sequences saves.", RING, [(own, shared)])

        if status.role == "prefill":
            yield _gauge("prefill_waiting_work", "Work units that wait.", RING, [(own, status.waiting_work)])
            most = "Most work units that may wait before the ring refuses more."
            yield _gauge("prefill_max_waiting_work", most, RING, [(own, status.max_waiting_work)])
            yield _counter(
                "prefill_layout_fallbacks",
                "Pieces of steps that got another layout because a single rank lacked room, by that layout.",
                (*RING, "reason"),
                [((*own, reason), view.layout_fallbacks.get(reason, 0)) for reason in LayoutFallback],
            )
        if status.role == "decode":
            yield _counter("num_preemptions", "Turns preempted for older ones.", RING, [(own, status.num_preemptions)])
            served = [((*own, variant), float(variant == status.decode_variant)) for variant in DECODE_VARIANTS]
            told = "1 for the variant that computed the latest decode step, 0 for the others."
            yield _gauge("ring_decode_variant", told, (*RING, "variant"), served)

    def _of_ranks(self, view: RingView) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "ringserve_kv_blocks", "KV blocks by what they are used for.", labels=(*RANK, "state")
        )
        for number, usage in enumerate(view.status.kv_usage):
            rank = (*self._labels, str(number))
            blocks.add_metric((*rank, "free"), usage.free_blocks)
            blocks.add_metric((*rank, "active"), usage.active_blocks)
            blocks.add_metric((*rank, "kept"), usage.kept_blocks)
        yield blocks
        ranks = [((*self._labels, str(number)), each) for number, each in enumerate(view.rank_statuses)]
        idle = "Since the rank's last step or heartbeat."
        yield _gauge("rank_idle_seconds", idle, RANK, [(rank, each.seconds_since_step) for rank, each in ranks])
        yield _gauge(
            "rank_open_transfers",
            "KV transfers under way to the rank.",
            RANK,
            [(rank, each.open_transfers) for rank, each in ranks],
        )
        yield _counter("rank_steps", "Forward passes.", RANK, [(rank, each.steps) for rank, each in ranks])
        yield _counter(
            "rank_step_seconds", "Time in forward passes.", RANK, [(rank, each.step_seconds) for rank, each in ranks]
        )
        yield _counter(
            "rank_exposed_communication_seconds",
            "The part of rank_step_seconds in which the rank waited for its peers; the rest is computation.",
            RANK,
            [(rank, each.wait_seconds) for rank, each in ranks],
        )
        memory = [
            ((*rank, kind), size)
            for rank, each in ranks
            if each.gpu is not None
            for kind, size in (
                ("total", each.gpu.total),
                ("reserved", each.gpu.reserved),
                ("allocated", each.gpu.allocated),
            )
        ]
        words = "Memory of the rank's GPU: all of it, what its process has reserved, and what its tensors take."
        yield _gauge("rank_gpu_memory_bytes", words, (*RANK, "kind"), memory)
        told = [(rank, each.communication_seconds) for rank, each in ranks if each.communication_seconds is not None]
        yield _counter(
            "rank_communication_seconds",
            "The part of rank_step_seconds in which messages of the ring were under way, hidden by computation or not.",
            RANK,
            told,
        )
        carried = [
            ((*rank, carrier), count)
            for rank, each in ranks
            for carrier, count in (("nixl", each.kv_nixl_bytes), ("sockets", each.kv_socket_bytes))
        ]
        yield _counter("rank_kv_bytes_sent", "KV sent to other rings.", (*RANK, "carrier"), carried)
        yield _counter(
            "rank_kv_fallbacks",
            "Connections whose KV goes by sockets because NIXL does not reach the other rank.",
            RANK,
            [(rank, each.kv_fallbacks) for rank, each in ranks],
        )
        eager = [((*rank, reason), float(count)) for rank, each in ranks for reason, count in each.eager_steps]
        yield _counter(
            "rank_eager_steps",
            "Decode steps that should have been replayed from a recording but were computed without one, by reason.",
            (*RANK, "reason"),
            eager,
        )
        waited = [((*rank, reason), float(count)) for rank, each in ranks for reason, count in each.waited_steps]
        yield _counter(
            "rank_waited_steps",
            "Decode steps of a GPU whose tokens were read before the next was issued, by the reason.",
            (*RANK, "reason"),
            waited,
        )
        drafted = [(rank, each.checked_drafts, each.accepted_drafts) for rank, each in ranks if each.checked_drafts]
        yield _counter(
            "spec_decode_num_drafts",
            "Steps of a sequence that checked drafts of its next tokens.",
            RANK,
            [(rank, checked[0]) for rank, checked, _ in drafted],
        )
        yield _counter(
            "spec_decode_num_draft_tokens",
            "Drafts of next tokens that were checked.",
            RANK,
            [(rank, sum(checked)) for rank, checked, _ in drafted],
        )
        yield _counter(
            "spec_decode_num_accepted_tokens",
            "Drafts of next tokens that were right.",
            RANK,
            [(rank, sum(accepted)) for rank, _, accepted in drafted],
        )
        yield _counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind the newest token.",
            (*RANK, "position"),
            [
                ((*rank, str(place)), float(count))
                for rank, _, accepted in drafted
                for place, count in enumerate(accepted)
            ],
        )
        yield self._step_times(view.rank_statuses)
        yield _counter(
            "rank_bytes_sent",
            "Bytes sent to peers of the ring.",
            RANK,
            [(rank, each.bytes_sent) for rank, each in ranks],
        )

    def _step_times(self, ranks: Sequence[RankStatus]) -> HistogramMetricFamily:
        """Return one histogram of the steps of all ranks, so that the number of series does not grow with the ranks."""
        family = HistogramMetricFamily("ringserve_step_time_seconds", "Forward passes of all ranks.", labels=RING)
        counts = [sum(each) for each in zip(*(rank.step_counts for rank in ranks), strict=True)]
        if counts:
            bounds = (*map(str, STEP_BOUNDS), "+Inf")
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(self._labels, buckets, sum(rank.step_seconds for rank in ranks))
        return family


Samples = Sequence[tuple[tuple[str, ...], float]]


def _gauge(name: str, help_text: str, labels: tuple[str, ...], samples: Samples) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"ringserve_{name}", help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _counter(name: str, help_text: str, labels: tuple[str, ...], samples: Samples) -> CounterMetricFamily:
    family = CounterMetricFamily(f"ringserve_{name}", help_text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family

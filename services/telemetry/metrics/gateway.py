"""Gateway metrics: turns as their clients see them. The servicer counts them; scrapes only read the counts."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ringserve.mapping import enum_name
from ringserve.services.telemetry.metrics.registry import (
    INTER_TOKEN,
    MOVES,
    RATIO,
    REQUEST,
    TIME_TO_FIRST_TOKEN,
    TOKENS,
    new_registry,
)
from ringserve.v1 import inference_pb2
from ringserve.workers.protocol.steps import Algorithm, FinishReason

REFUSALS = (
    "invalid_argument",
    "resource_exhausted",
    "aborted",
    "not_found",
    "failed_precondition",
    "unauthenticated",
    "permission_denied",
)
"""Outcomes in which the gateway refused the request for a reason that the client can act on, as gRPC status names."""
FAILURES = ("cancelled", "deadline_exceeded", "unavailable", "internal")
FINISHED = (FinishReason.STOP.value, FinishReason.LENGTH.value)
OUTCOMES = (*FINISHED, *REFUSALS, *FAILURES)
ENDPOINTS = ("grpc", "http")
KEPT_OUT = ("unauthenticated", "permission_denied")
"""Reasons for which a call is refused before it is a request."""
OTHER = "other"
"""Label of a value outside the lists: values of clients and later versions must not add labels."""
LOST = ("prefill", "decode", "gateway")
SOURCES = ("kept_on_prefill", "pulled_from_decode", "pulled_from_other", "kept_on_decode")
ALGORITHMS = tuple(algorithm.value for algorithm in Algorithm)


SLICE_SECONDS = 5.0
NUM_SLICES = 120
NOW_SLICES = 2
STEP = math.log(1.1)
SHORTEST_SECONDS = 1e-6


class GatewayMetrics:
    """Series of one gateway process, in a registry of its own, and its recent load.

    If callers are tenants, at most `max_tenants` of them have series of their own.
    """

    def __init__(self, max_tenants: int = 0) -> None:
        registry = self.registry = new_registry("gateway")
        self.recent = RecentLoad()
        self._running = Gauge("ringserve_requests_in_progress", "Requests being served.", registry=registry)
        self._tenants = _TenantMetrics(registry, max_tenants)
        self._requests = _counter(registry, "requests", "Ended requests by outcome.", "outcome", OUTCOMES)
        self._refused = _counter(registry, "requests_refused", "Refused requests by reason.", "reason", REFUSALS)
        self._kept_out = Counter(
            "ringserve_calls_refused",
            "Calls refused for their credentials or rights, by endpoint and reason.",
            ["endpoint", "reason"],
            registry=registry,
        )
        for endpoint, reason in product(ENDPOINTS, KEPT_OUT):
            self._kept_out.labels(endpoint, reason)
        self._ignored = Counter(
            "ringserve_ignored_fields",
            "Fields of HTTP requests that are not served and were ignored.",
            registry=registry,
        )
        self._successes = _counter(
            registry, "request_success", "Complete answers by finish reason.", "finished_reason", FINISHED
        )
        self._plans = _counter(registry, "plans", "Turns by the algorithm of their prefill.", "algorithm", ALGORITHMS)
        self._cached = _counter(
            registry, "cached_prompt_tokens", "Prompt tokens not computed again.", "source", SOURCES
        )
        self._failovers = _counter(
            registry,
            "failovers",
            "Turns that lost a ring or their gateway and continued, by the role of what was lost.",
            "role",
            LOST,
        )
        self._failed_failovers = Counter(
            "ringserve_failed_failovers", "Turns that lost a ring and could not continue.", registry=registry
        )
        self._prompt_tokens = Counter("ringserve_prompt_tokens", "Prompt tokens.", registry=registry)
        self._generated = Counter("ringserve_generation_tokens", "Generated tokens.", registry=registry)
        self._migrated = _counter(
            registry, "migrated_bytes", "KV moved between rings.", "direction", ("to_decode", "to_prefill")
        )
        self._prompt_length = Histogram(
            "ringserve_request_prompt_tokens", "Prompt tokens of a turn.", buckets=TOKENS, registry=registry
        )
        self._answer_length = Histogram(
            "ringserve_request_generation_tokens", "Generated tokens of a turn.", buckets=TOKENS, registry=registry
        )
        self._ratio = Histogram(
            "ringserve_prefill_predicted_ratio",
            "Predicted over actual prefill seconds.",
            ["algorithm"],
            buckets=RATIO,
            registry=registry,
        )
        for algorithm in ALGORITHMS:
            self._ratio.labels(algorithm)
        self._ttft = _seconds(
            registry, "time_to_first_token", "Request received to first token sent.", TIME_TO_FIRST_TOKEN
        )
        self._gap = _Gaps("inter_token_latency", "Time from a token to the next of its turn.", INTER_TOKEN)
        registry.register(self._gap)
        self._ttit = _seconds(
            registry, "request_time_per_output_token", "Mean time between a turn's tokens.", INTER_TOKEN
        )
        self._whole = _seconds(registry, "e2e_request_latency", "Request received to its end, whatever the end.")
        self._queue = _seconds(
            registry, "request_queue_time", "Time from a turn's reservation to the start of its prefill, pull included."
        )
        self._pull = _seconds(
            registry, "request_pull_time", "Pull of KV from another ring, within the queue's time.", MOVES
        )
        self._prefill = _seconds(registry, "request_prefill_time", "Prefill of the new tokens.")
        self._migration = _seconds(registry, "request_migration_time", "First KV byte received to the seal.", MOVES)
        self._handoff = _seconds(registry, "request_handoff_time", "First token made to the first decode step.", MOVES)
        self._decode = _seconds(registry, "request_decode_time", "First token sent to the last.")

    def add_tenants(self, names: Iterable[str]) -> None:
        """Begin the series of tenants in this order, as far as there is room."""
        for name in names:
            self._tenants.label_of(name)

    def began(self, tenant: str = "") -> None:
        self._running.inc()
        self._tenants.began(tenant)

    def ended(self, outcome: str, seconds: float, tenant: str = "", trace_id: str = "") -> None:
        """Count an ended request. `outcome` is a finish reason, or a gRPC status name in lower case."""
        self._running.dec()
        self._tenants.ended(tenant, outcome)
        self._requests.labels(_known(outcome, OUTCOMES)).inc()
        recent = self.recent.current
        recent.requests += 1
        if outcome in REFUSALS:
            recent.refused += 1
            self._refused.labels(outcome).inc()
        elif outcome not in FINISHED and outcome != "cancelled":
            recent.failed += 1
        self._whole.observe(seconds, _exemplar(trace_id))

    def planned(self, algorithm: str, prompt_tokens: int, cached: dict[str, int], tenant: str = "") -> None:
        """Count a planned turn. `cached` maps sources to tokens that are not computed again."""
        self._tenants.count_tokens(tenant, prompt=prompt_tokens, cached=sum(cached.values()))
        self._plans.labels(_known(algorithm, ALGORITHMS)).inc()
        self._prompt_tokens.inc(prompt_tokens)
        recent = self.recent.current
        recent.prompt_tokens += prompt_tokens
        recent.cached_tokens += sum(cached.values())
        self._prompt_length.observe(prompt_tokens)
        for source, tokens in cached.items():
            self._cached.labels(_known(source, SOURCES)).inc(tokens)

    def ignored_fields(self, count: int) -> None:
        """Count fields of an HTTP request that were ignored."""
        self._ignored.inc(count)

    def refused_call(self, endpoint: str, reason: str) -> None:
        """Count a call that was refused for its credentials or rights, before it was a request."""
        self._kept_out.labels(_known(endpoint, ENDPOINTS), _known(reason, KEPT_OUT)).inc()

    def sent_tokens(self, num_tokens: int, gap: float | None) -> None:
        """Observe the time before each of `num_tokens` tokens sent together, `gap` seconds after the turn's last ones.

        Only the first token has waited. `gap` is None if the turn has no earlier tokens; no wait is then observed.
        """
        recent = self.recent.current
        recent.generated_tokens += num_tokens
        if gap is not None:
            self._gap.observe(gap)
            recent.between_tokens.observe(gap / num_tokens, num_tokens)
        self._gap.observe(0.0, num_tokens - 1)

    def lost_ring(self, role: str, went_on: bool) -> None:
        """Count a turn that lost its ring of a role, or its gateway."""
        if went_on:
            self._failovers.labels(_known(role, LOST)).inc()
        else:
            self._failed_failovers.inc()

    def completed(self, complete: inference_pb2.GenerateComplete, tenant: str = "", trace_id: str = "") -> None:
        """Observe the parts of a completed turn."""
        plan, tokens = complete.plan, complete.usage.completion_tokens
        self._tenants.count_tokens(tenant, generated=tokens)
        self._successes.labels(_known(enum_name(inference_pb2.FinishReason, complete.finish_reason), FINISHED)).inc()
        self._answer_length.observe(tokens)
        self._generated.inc(tokens)
        self._ttft.observe(complete.ttft_seconds, _exemplar(trace_id))
        self.recent.current.first_token.observe(complete.ttft_seconds)
        if tokens > 1:
            self._ttit.observe(complete.ttit_seconds)
        self._decode.observe(complete.ttit_seconds * max(0, tokens - 1))
        self._queue.observe(plan.queue_seconds)
        self._pull.observe(plan.pull_seconds)
        self._prefill.observe(plan.prefill_seconds)
        self._migration.observe(plan.migration_seconds)
        self._handoff.observe(plan.handoff_seconds)
        self._migrated.labels("to_decode").inc(plan.migrated_bytes)
        self._migrated.labels("to_prefill").inc(plan.pulled_bytes)
        if plan.prefill_seconds > 0:
            ratio = plan.predicted_prefill_seconds / plan.prefill_seconds
            self._ratio.labels(_known(enum_name(inference_pb2.Algorithm, plan.algorithm), ALGORITHMS)).observe(ratio)


class _Spread:
    """Times by their logarithm: enough for quantiles within 5 %, whatever their number."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def observe(self, seconds: float, times: int = 1) -> None:
        place = round(math.log(max(seconds, SHORTEST_SECONDS)) / STEP)
        self._counts[place] = self._counts.get(place, 0) + times

    def add(self, other: _Spread) -> None:
        for place, times in other._counts.items():
            self._counts[place] = self._counts.get(place, 0) + times

    def quantile(self, share: float) -> float | None:
        """Return the time that this share of all does not exceed; None without any."""
        wanted = share * sum(self._counts.values())
        seen = 0
        for place, times in sorted(self._counts.items()):
            seen += times
            if seen >= wanted:
                return math.exp(place * STEP)
        return None


class _Slice:
    """Counts of the requests and tokens in one slice of time."""

    def __init__(self) -> None:
        self.requests = self.failed = self.refused = 0
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token, self.between_tokens = _Spread(), _Spread()

    def add(self, other: _Slice) -> None:
        for name in ("requests", "failed", "refused", "prompt_tokens", "cached_tokens", "generated_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_token.add(other.first_token)
        self.between_tokens.add(other.between_tokens)

    def view(self, seconds: float) -> dict[str, float | None]:
        """Return rates by the seconds that this slice lasted, and quantiles."""
        return {
            "requests_per_second": self.requests / seconds,
            "prompt_tokens_per_second": self.prompt_tokens / seconds,
            "generated_tokens_per_second": self.generated_tokens / seconds,
            "cached_share": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "ttft_seconds_p50": self.first_token.quantile(0.5),
            "ttft_seconds_p95": self.first_token.quantile(0.95),
            "inter_token_seconds_p50": self.between_tokens.quantile(0.5),
            "inter_token_seconds_p95": self.between_tokens.quantile(0.95),
            "requests": self.requests,
            "failed": self.failed,
            "refused": self.refused,
        }


class RecentLoad:
    """Load of a gateway in the last ten minutes, in slices, for the status page. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._slices: deque[_Slice] = deque([_Slice()], maxlen=NUM_SLICES + 1)
        self._number = 0

    @property
    def current(self) -> _Slice:
        """Slice of the present time, which is still counted into."""
        number = int((self._clock() - self._began) / SLICE_SECONDS)
        if number != self._number:  # asked at every token
            self._slices.extend(_Slice() for _ in range(min(number - self._number, NUM_SLICES + 1)))
            self._number = number
        return self._slices[-1]

    def view(self) -> dict[str, object]:
        """Return the load of the last ten seconds, of ten minutes, and of each slice, the oldest first.

        The current, unfinished slice is included in the first two loads and is not in the list of slices.
        """
        whole, now = _Slice(), _Slice()
        current = self.current
        for each in self._slices:
            whole.add(each)
        for each in list(self._slices)[-1 - NOW_SLICES :]:
            now.add(each)
        elapsed = self._clock() - self._began
        rest = elapsed - self._number * SLICE_SECONDS
        ended = [each for each in self._slices if each is not current]
        return {
            "slice_seconds": SLICE_SECONDS,
            "now": now.view(max(rest + min(len(ended), NOW_SLICES) * SLICE_SECONDS, 1.0)),
            "ten_minutes": whole.view(max(rest + len(ended) * SLICE_SECONDS, 1.0)),
            "slices": [each.view(SLICE_SECONDS) for each in ended],
        }


TENANT_OUTCOMES = ("answered", "busy", "refused", "failed")
"""Ends of a tenant's requests: `busy` is a limit or lack of room, `refused` any other answer that the client caused."""
TENANT_TOKENS = ("prompt", "cached", "generated")


class _TenantMetrics:
    """Series by tenant, for at most `max_tenants` of them; OTHER stands for the rest.

    A tenant keeps its label for the life of the process, so that a changed file of tenants adds no label beyond these.
    """

    def __init__(self, registry: CollectorRegistry, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._labels: set[str] = set()
        registry = registry if max_tenants else CollectorRegistry()
        self._running = Gauge(
            "ringserve_tenant_requests_in_progress", "Requests being served.", ["tenant"], registry=registry
        )
        self._requests = Counter(
            "ringserve_tenant_requests", "Ended requests by outcome.", ["tenant", "outcome"], registry=registry
        )
        self._tokens = Counter(
            "ringserve_tenant_tokens",
            "Tokens of prompts, those of them that were cached, and generated ones.",
            ["tenant", "kind"],
            registry=registry,
        )

    def label_of(self, tenant: str) -> str:
        """Return the label of a tenant; empty if there are no series by tenant, or if the caller is not a tenant."""
        if not tenant or not self._max_tenants or tenant in self._labels:
            return tenant if self._max_tenants else ""
        label = tenant if len(self._labels - {OTHER}) < self._max_tenants else OTHER
        if label not in self._labels:
            self._labels.add(label)
            self._running.labels(label)
            for outcome in TENANT_OUTCOMES:
                self._requests.labels(label, outcome)
            for kind in TENANT_TOKENS:
                self._tokens.labels(label, kind)
        return label

    def began(self, tenant: str) -> None:
        if label := self.label_of(tenant):
            self._running.labels(label).inc()

    def ended(self, tenant: str, outcome: str) -> None:
        if label := self.label_of(tenant):
            self._running.labels(label).dec()
            self._requests.labels(label, _tenant_outcome(outcome)).inc()

    def count_tokens(self, tenant: str, **tokens: int) -> None:
        """Count tokens by their kind, one of TENANT_TOKENS."""
        if label := self.label_of(tenant):
            for kind, number in tokens.items():
                self._tokens.labels(label, kind).inc(number)


def _tenant_outcome(outcome: str) -> str:
    if outcome in FINISHED:
        return "answered"
    if outcome == "resource_exhausted":
        return "busy"
    return "refused" if outcome in REFUSALS else "failed"


def _exemplar(trace_id: str) -> dict[str, str] | None:
    """Return the exemplar that points from an observation to its turn's trace; None if there is no trace."""
    return {"trace_id": trace_id} if trace_id else None


def _known(value: str, allowed: tuple[str, ...]) -> str:
    return value if value in allowed else OTHER


def _counter(registry: CollectorRegistry, name: str, help_text: str, label: str, values: tuple[str, ...]) -> Counter:
    """Return a counter by one label, with every value present: rate() needs the zero before the one."""
    counter = Counter(f"ringserve_{name}", help_text, [label], registry=registry)
    for value in values:
        counter.labels(value)
    return counter


class _Gaps(Collector):
    """Histogram of the times between tokens. Most tokens come together, so equal times are counted in one call."""

    def __init__(self, name: str, help_text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._help_text = f"ringserve_{name}_seconds", help_text
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of `seconds`."""
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        """Yield the series."""
        within = accumulate(self._counts.copy())  # scrapes come from another thread
        buckets = [(floatToGoString(bound), count) for bound, count in zip(self._bounds, within, strict=True)]
        yield HistogramMetricFamily(self._name, self._help_text, buckets=buckets, sum_value=self._sum)


def _seconds(registry: CollectorRegistry, name: str, help_text: str, bounds: tuple[float, ...] = REQUEST) -> Histogram:
    return Histogram(f"ringserve_{name}_seconds", help_text, buckets=bounds, registry=registry)

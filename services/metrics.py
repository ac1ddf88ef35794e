"""What a gateway tells Prometheus. Names and buckets follow vLLM's where they mean the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

TTFT_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
TTIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)


class GatewayMetrics:
    """All series of one gateway process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = {"role": "gateway"}
        self._running = Gauge(
            "ringserve_num_requests_running", "Turns being served.", labels.keys(), registry=self.registry
        ).labels(**labels)
        self._requests = Counter(
            "ringserve_requests", "Ended requests by outcome.", ["outcome"], registry=self.registry
        )
        self._plans = Counter(
            "ringserve_plans", "Turns by the algorithm of their prefill.", ["algorithm"], registry=self.registry
        )
        self._prompt_tokens = Counter("ringserve_prompt_tokens", "Prompt tokens.", registry=self.registry)
        self._cached_tokens = Counter(
            "ringserve_cached_prompt_tokens", "Prompt tokens not computed again.", ["source"], registry=self.registry
        )
        self._generated = Counter("ringserve_generation_tokens", "Generated tokens.", registry=self.registry)
        self._ttft = Histogram(
            "ringserve_time_to_first_token_seconds",
            "Request received to first token sent.",
            buckets=TTFT_BUCKETS,
            registry=self.registry,
        )
        self._ttit = Histogram(
            "ringserve_inter_token_latency_seconds",
            "Mean time between a turn's tokens.",
            buckets=TTIT_BUCKETS,
            registry=self.registry,
        )

    def began(self) -> None:
        self._running.inc()

    def ended(self, outcome: str) -> None:
        """`outcome`: a finish reason, or a gRPC status name in lower case."""
        self._running.dec()
        self._requests.labels(outcome).inc()

    def planned(self, algorithm: str, prompt_tokens: int, cached: dict[str, int]) -> None:
        self._plans.labels(algorithm).inc()
        self._prompt_tokens.inc(prompt_tokens)
        for source, tokens in cached.items():
            self._cached_tokens.labels(source).inc(tokens)

    def generated(self, tokens: int, ttft_seconds: float, ttit_seconds: float) -> None:
        self._generated.inc(tokens)
        self._ttft.observe(ttft_seconds)
        if tokens > 1:
            self._ttit.observe(ttit_seconds)

"""Registry of a process's metrics, buckets of histograms in seconds, and copies of series under vLLM's names.

The metrics of gateways, rings and router use it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def new_registry(role: str) -> CollectorRegistry:
    """Return a registry with memory, processor time and files of this process, and `ringserve_build_info`."""
    disable_created_metrics()  # they double the series of every counter and no dashboard reads them
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    labels = {"role": role, "version": package_version(), "python": platform.python_version()}
    build = Gauge("ringserve_build_info", "Always 1; what runs is in the labels.", labels.keys(), registry=registry)
    build.labels(**labels).set(1)
    return registry


def package_version() -> str:
    """Return the version of the installed ringserve."""
    try:
        return version("ringserve")
    except PackageNotFoundError:
        return "unknown"


TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0),
)
INTER_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
REQUEST = (
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)
"""Buckets of whole requests and of their long parts: queue, prefill, decode."""
MOVES = (0.001, 0.0025, 0.005, 0.01, 0.025, *REQUEST)
"""Buckets of moves of KV: pull, migration, hand-off take milliseconds on a fast network."""
CONTROL = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Buckets of the time that the control plane adds to a turn."""
RATIO = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Buckets of predicted over actual: 1 is a perfect prediction."""
TOKENS = (*(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)), 1e6, 2e6)


# vLLM's names for our series of the same meaning. vLLM looks up every prompt token in its prefix cache, so our prompt
# tokens are also its prefix cache queries.
GATEWAY_NAMES = {
    "ringserve_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "ringserve_inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "ringserve_request_time_per_output_token_seconds": ("vllm:request_time_per_output_token_seconds",),
    "ringserve_request_success": ("vllm:request_success",),
    "ringserve_request_generation_tokens": ("vllm:request_generation_tokens",),
    "ringserve_e2e_request_latency_seconds": ("vllm:e2e_request_latency_seconds",),
    "ringserve_request_queue_time_seconds": ("vllm:request_queue_time_seconds",),
    "ringserve_request_prefill_time_seconds": ("vllm:request_prefill_time_seconds",),
    "ringserve_request_decode_time_seconds": ("vllm:request_decode_time_seconds",),
    "ringserve_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "ringserve_prompt_tokens": ("vllm:prompt_tokens", "vllm:prefix_cache_queries"),
    "ringserve_cached_prompt_tokens": ("vllm:prefix_cache_hits",),
    "ringserve_generation_tokens": ("vllm:generation_tokens",),
}
RING_NAMES = {
    "ringserve_num_requests_running": ("vllm:num_requests_running",),
    "ringserve_num_requests_waiting": ("vllm:num_requests_waiting",),
    "ringserve_kv_cache_usage_perc": ("vllm:kv_cache_usage_perc",),
    "ringserve_num_preemptions": ("vllm:num_preemptions",),
    "ringserve_cache_config_info": ("vllm:cache_config_info",),
    "ringserve_spec_decode_num_drafts": ("vllm:spec_decode_num_drafts",),
    "ringserve_spec_decode_num_draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "ringserve_spec_decode_num_accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
    "ringserve_spec_decode_num_accepted_tokens_per_pos": ("vllm:spec_decode_num_accepted_tokens_per_pos",),
}


class WithVllmNames(Collector):
    """Registry with renamed copies of its series. Copies carry `model_name` as vLLM's do, and our own labels."""

    def __init__(
        self, collect: Callable[[], Iterable[Metric]], names: Mapping[str, tuple[str, ...]], model: str
    ) -> None:
        self._collect = collect
        self._names = names
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            yield metric
            for name in self._names.get(metric.name, ()):
                yield self._renamed(metric, name)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            labels = {**sample.labels, "model_name": self._model}
            copy.add_sample(name + suffix, labels, sample.value, exemplar=sample.exemplar)
        return copy

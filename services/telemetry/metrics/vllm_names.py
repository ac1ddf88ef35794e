"""The same values once more under vLLM's names, for dashboards that were made for it. Off by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

GATEWAY_NAMES = {
    "ringserve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "ringserve_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "ringserve_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "ringserve_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "ringserve_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "ringserve_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "ringserve_request_prompt_tokens": "vllm:request_prompt_tokens",
    "ringserve_prompt_tokens": "vllm:prompt_tokens",
    "ringserve_generation_tokens": "vllm:generation_tokens",
}
RING_NAMES = {
    "ringserve_num_requests_running": "vllm:num_requests_running",
    "ringserve_num_requests_waiting": "vllm:num_requests_waiting",
    "ringserve_kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "ringserve_num_preemptions": "vllm:num_preemptions",
}


class WithVllmNames(Collector):
    """A registry and its renamed copies. Copies carry `model_name` as vLLM's series do, and our own labels."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], names: Mapping[str, str], model: str) -> None:
        self._collect = collect
        self._names = names
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            yield metric
            if metric.name in self._names:
                yield self._renamed(metric, self._names[metric.name])

    def _renamed(self, metric: Metric, name: str) -> Metric:
        copy = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            suffix = sample.name.removeprefix(metric.name)
            copy.add_sample(name + suffix, {**sample.labels, "model_name": self._model}, sample.value)
        return copy

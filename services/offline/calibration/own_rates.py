"""A profile before it is fitted: what rings measured of themselves when they started."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cp_core.cost.model import ModelShape
from cp_core.cost.profile import DecodeConstants, HardwareProfile, PrefillConstants
from cp_core.errors import Unavailable
from ringserve.v1 import inference_pb2
from workers.model.info import ELEMENT_BYTES
from workers.protocol.steps import RingRates

LEAST_SECONDS = 1e-6
"""Of a constant before it is fitted: one that is 0 would stay so."""


def shape_of(model: inference_pb2.GetModelInfoResponse) -> ModelShape:
    """Raises Unavailable where the service is too old to tell."""
    if not model.intermediate_size or model.dtype not in ELEMENT_BYTES:
        raise Unavailable("the service does not tell its model's sizes; it is older than this ringserve")
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        element_bytes=ELEMENT_BYTES[model.dtype],
    )


def profile_before(
    model: inference_pb2.GetModelInfoResponse, rings: Sequence[inference_pb2.RingInfo], name: str
) -> HardwareProfile:
    """What the prefill rings measured of themselves when they started; nothing is known of decode but the weights.

    Raises Unavailable where no ring told its rates.
    """
    rings = [ring for ring in rings if ring.role == "prefill" and ring.HasField("rates")]
    if not rings:
        raise Unavailable("no prefill ring has told its rates; is one ready, and as new as this ringserve?")
    # A ring of one rank has no links to measure.
    linked = [ring for ring in rings if ring.num_ranks > 1] or rings
    element_bytes = ELEMENT_BYTES[model.dtype]
    weights = model.num_parameters * element_bytes
    return profile_of_rates(
        RingRates(
            gemm_flops=median(ring.rates.gemm_flops for ring in rings),
            attention_flops=median(ring.rates.attention_flops for ring in rings),
            link_bytes_per_second=median(ring.rates.link_bytes_per_second for ring in linked),
            link_latency_seconds=median(ring.rates.link_latency_seconds for ring in linked),
            overlap=median(ring.rates.overlap for ring in linked),
        ),
        name=name,
        element_bytes=element_bytes,
        processes_per_host=max(ring.tp or 1 for ring in rings),
        memory_bytes=min(
            (weights + ring.capacity_tokens / ring.num_ranks * model.kv_bytes_per_token) / (ring.tp or 1)
            for ring in rings
        ),
    )


def profile_of_rates(
    rates: RingRates, *, name: str, element_bytes: int, processes_per_host: int, memory_bytes: float
) -> HardwareProfile:
    """What a rank measured of itself and its link, in a profile's form; elements are those of the model."""
    gemm, link = rates.gemm_flops, rates.link_bytes_per_second
    latency = max(LEAST_SECONDS, rates.link_latency_seconds)
    return HardwareProfile(
        name=name,
        source="",
        processes_per_host=processes_per_host,
        memory_bytes=memory_bytes,
        kv_link_bytes_per_second=link,
        prefill=PrefillConstants(
            gemm_flops=gemm,
            attention_flops=rates.attention_flops,
            link_bytes_per_second=link,
            link_latency_seconds=latency,
            all_to_all_bytes_per_second=link,
            all_to_all_latency_seconds=latency,
            host_sum_bytes_per_second=link,
            sum_bytes_per_second=link,
            overlap=rates.overlap,
            layer_overhead_seconds=LEAST_SECONDS,
            cached_overhead_seconds=LEAST_SECONDS,
        ),
        decode=DecodeConstants(
            # Two operations an element: as fast as the products of many rows read them, so that weights take least.
            weight_bytes_per_second=gemm / 2 * element_bytes,
            kv_bytes_per_second=gemm / 2 * element_bytes,
            attention_seconds=latency,
            free_rows=1,
            row_seconds=0.0,
            hop_seconds=latency,
            all_to_all_seconds=latency,
            ring_seconds=0.0,
            sum_seconds=latency,
            host_seconds=0.0,
        ),
    )

"""Models, rates and registrations of rings that tests of several rooms share."""

from __future__ import annotations

from typing import Any

from ringserve.orchestration.protocol.turns import RingRegistration
from ringserve.views import RingRates
from ringserve.workers.protocol.ranks import ModelInfo

LLAMA_8B = ModelInfo(
    name="llama",
    model_type="llama",
    dtype="bfloat16",
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_positions=1 << 20,
    num_parameters=0,
    element_bytes=2,
    kv_dtype="bfloat16",
    kv_element_bytes=2,
    eos_token_ids=(),
)
GPU_RATES = RingRates(gemm_flops=4e14, attention_flops=3e14, link_bytes_per_second=2e10, link_latency_seconds=2e-5)
CPU_RATES = RingRates(gemm_flops=1e9, attention_flops=1e9, link_bytes_per_second=1e8, link_latency_seconds=1e-3)


def registration(role: str = "prefill", name: str = "ring", **fields: Any) -> RingRegistration:
    """Return the registration of a ring of two ranks with room for everything; `fields` replace its defaults."""
    defaults: dict[str, Any] = {
        "endpoint": f"{name}:1",
        "incarnation": "first",
        "num_ranks": 2,
        "rates": CPU_RATES,
        "capacity_tokens": 1 << 20,
        "chunk_tokens": 1 << 20,
    }
    return RingRegistration(role=role, name=name, **(defaults | fields))

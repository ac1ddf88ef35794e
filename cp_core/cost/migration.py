"""What it takes to bring a turn's KV from the ring that prefilled it to the ring that decodes."""

from __future__ import annotations

from dataclasses import dataclass

from cp_core.cost.memory import kv_bytes_per_token
from cp_core.cost.model import ModelShape
from cp_core.cost.profile import HardwareProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationCost:
    """`wire_seconds` of sending, of which `exposed_seconds` come after the prefill."""

    total_bytes: float
    wire_seconds: float
    exposed_seconds: float


def predict_migration(
    model: ModelShape,
    profile: HardwareProfile,
    *,
    from_processes: int,
    to_processes: int,
    tokens: int,
    prefill_seconds: float,
) -> MigrationCost:
    """KV of `tokens` between rings of so many processes (cp x tp) each, sent layer by layer as it is computed.

    The smaller ring's links are what limits it. The last layer's KV is ready when the prefill ends, so at least its
    share is exposed.
    """
    total = float(tokens * kv_bytes_per_token(model))
    wire = total / (min(from_processes, to_processes) * profile.kv_link_bytes_per_second)
    last_layer = wire / model.num_layers
    return MigrationCost(
        total_bytes=total,
        wire_seconds=wire,
        exposed_seconds=max(last_layer, wire - prefill_seconds * (1.0 - 1.0 / model.num_layers)),
    )

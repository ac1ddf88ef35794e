"""What one of `tp` tensor parallel processes holds of a model's layers, and the sums between those processes."""

from __future__ import annotations

from dataclasses import replace

from cp_core.cost.model import ModelShape
from cp_core.cost.profile import HardwareProfile


def process_share(model: ModelShape, tp: int) -> ModelShape:
    """The sizes of one process. KV heads are at least one: with more processes than KV heads each is held by several,
    as arXiv 2411.01783, 4.2.2 does for its comparison.
    """
    if tp == 1:
        return model
    return replace(
        model,
        intermediate_size=-(-model.intermediate_size // tp),
        num_heads=-(-model.num_heads // tp),
        num_kv_heads=max(1, model.num_kv_heads // tp),
        vocab_size=-(-model.vocab_size // tp),
    )


def num_hosts(profile: HardwareProfile, tp: int) -> int:
    """Over which a group of `tp` processes spreads."""
    return -(-tp // profile.processes_per_host)


def sum_seconds(model: ModelShape, profile: HardwareProfile, tp: int, rows: int) -> float:
    """The bytes of all sums over `tp` processes for `rows` tokens: two a layer and one for the embedding, each a ring
    all-reduce that sends and receives 2 (tp - 1) / tp of what is summed.
    """
    if tp == 1:
        return 0.0
    constants = profile.prefill
    is_inside = num_hosts(profile, tp) == 1
    rate = constants.host_sum_bytes_per_second if is_inside else constants.sum_bytes_per_second
    summed = rows * model.hidden_size * model.element_bytes
    return (1 + 2 * model.num_layers) * 2 * (tp - 1) / tp * summed / rate

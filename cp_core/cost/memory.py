"""Process memory: weights, KV, and the buffers of a step. Pure Python; offline planning and simulation use it."""

from __future__ import annotations

from dataclasses import dataclass

from ringserve.cp_core.cost.model import ModelShape
from ringserve.cp_core.cost.profile import HardwareProfile

# Share of a process's memory that the runtime, its kernels and fragmentation take.
RESERVED_SHARE = 0.05
# The residual, and the input and output of the block at work.
HIDDEN_COPIES = 3
# Gate and up of a gated MLP.
MLP_COPIES = 2
# The KV that is attended and the KV that is under way.
MESSAGE_COPIES = 2
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBytes:
    """Bytes of a whole model. A decode step reads the layers and the head, and a row of the embedding."""

    layers: float
    head: float
    embedding: float

    @property
    def total(self) -> float:
        """Bytes of all matrices."""
        return self.layers + self.head + self.embedding


def weight_bytes(
    model: ModelShape, *, mlp_element_bytes: float | None = None, has_tied_embedding: bool = False
) -> WeightBytes:
    """Return the bytes of all matrices. `mlp_element_bytes` is the MLP's, if only the MLP is quantised."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    mlp_bytes = model.element_bytes if mlp_element_bytes is None else mlp_element_bytes
    vocabulary = model.vocab_size * model.hidden_size * model.element_bytes
    return WeightBytes(
        layers=model.num_layers * (attention * model.element_bytes + mlp * mlp_bytes),
        head=vocabulary,
        embedding=0.0 if has_tied_embedding else vocabulary,
    )


def kv_bytes_per_token(model: ModelShape, tp: int = 1) -> int:
    """Return the bytes of K and V of all layers that one of `tp` processes stores for one token."""
    share = model.share(tp)
    return 2 * share.num_layers * share.num_kv_heads * share.head_dim * share.attention_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Process bytes. `kv_bytes` remain for KV; they are negative if not even the rest fits."""

    weights_bytes: float
    step_bytes: float
    reserved_bytes: float
    kv_bytes: float
    kv_bytes_per_token: int

    def max_tokens(self, cp: int) -> int:
        """Return the tokens that a ring of `cp` such ranks holds, its KV spread evenly."""
        return max(0, int(self.kv_bytes // self.kv_bytes_per_token)) * cp


def process_memory(
    model: ModelShape,
    weights: WeightBytes,
    profile: HardwareProfile,
    *,
    cp: int,
    tp: int,
    step_tokens: int,
    context_tokens: int,
) -> ProcessMemory:
    """Return the memory of a process whose ring computes `step_tokens` at a time over a context of `context_tokens`."""
    share = model.share(tp)
    rows = -(-step_tokens // cp)
    heads = (2 * share.num_heads + 2 * share.num_kv_heads) * share.head_dim * share.attention_bytes
    row = (HIDDEN_COPIES * share.hidden_size + MLP_COPIES * share.intermediate_size) * share.element_bytes + heads
    # Two partial outputs with their LSE: the one just computed and the one it is merged into.
    partials = 2 * share.num_heads * (share.head_dim + 1) * FLOAT32_BYTES
    stored = -(-context_tokens // cp) if cp > 1 else 0
    messages = MESSAGE_COPIES * stored * kv_bytes_per_token(model, tp) / share.num_layers
    step = rows * (row + partials) + messages
    reserved = RESERVED_SHARE * profile.memory_bytes
    own_weights = weights.total / tp
    return ProcessMemory(
        weights_bytes=own_weights,
        step_bytes=step,
        reserved_bytes=reserved,
        kv_bytes=profile.memory_bytes - reserved - own_weights - step,
        kv_bytes_per_token=kv_bytes_per_token(model, tp),
    )

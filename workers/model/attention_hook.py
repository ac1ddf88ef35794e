"""Hook from transformers' attention to ring attention: one registered function that calls the step in its keywords.

T tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "ringserve"


class AttentionStep(Protocol):
    """Forward pass with its layout, cache and ring, passed to the model as keyword `ring_step`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k and v[T,K,D], attend q[T,H,D] over all earlier tokens and its own -> [T,H,D]."""
        ...


def register() -> None:
    """Make "ringserve" an attention implementation of transformers; calling it again changes nothing.

    No mask function is registered with it: without one transformers builds no mask and does not examine positions.
    """
    AttentionInterface.register(IMPLEMENTATION, attend_in_ring)


def attend_in_ring(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    ring_step: AttentionStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend rotated query[1,H,T,D] to key and value[1,K,T,D] -> (out[1,T,H,D], None), as transformers calls it."""
    assert attention_mask is None, "the step's layout determines attention; no mask is ever built"
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = ring_step.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)
    return out.unsqueeze(0), None

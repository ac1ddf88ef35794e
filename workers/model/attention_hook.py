"""Where transformers' attention becomes ours: one registered function, and the step it finds in its keywords.

T tokens, H query heads, K KV heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "ringserve"


class AttentionStep(Protocol):
    """One forward pass: knows the step's layout, cache and ring. Passed to the model as keyword `ring_step`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k and v, attend q over everything earlier and itself. q[T,H,D], k and v[T,K,D] -> [T,H,D]."""
        ...


def register() -> None:
    """Make "ringserve" an attention implementation of transformers; calling it again changes nothing.

    No mask function is registered with it: for an implementation without one transformers builds no mask, and skips
    even the look at the positions that a mask would need.
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
    """Transformers' attention signature: query[1,H,T,D], key and value[1,K,T,D], rotated -> (out[1,T,H,D], None)."""
    assert attention_mask is None, "the step's layout says what attends to what; no mask is ever built"
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = ring_step.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)
    return out.unsqueeze(0), None

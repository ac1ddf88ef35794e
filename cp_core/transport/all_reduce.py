"""Sums and joins over the ranks of a tensor parallel group, the same bits on each of them.

T tokens, any leading dims.
"""

from __future__ import annotations

import torch

from cp_core.transport.interface import RingTransport

# Up to here one round of whole tensors beats two rounds of parts: a message's start costs more than its bytes.
ONE_ROUND_BYTES = 64 << 10


def all_reduce(partial: torch.Tensor, transport: RingTransport) -> torch.Tensor:
    """The sum of every rank's `partial`, of its shape and dtype. Added in rank order and in fp32 at least.

    Moves (N - 1) * size bytes from each rank where N is 2 or the tensor is small, else 2 * (N - 1) / N * size.
    Raises Unavailable if the group breaks.
    """
    if transport.size == 1:
        return partial
    flat = partial.contiguous().view(-1)
    if transport.size == 2 or flat.nbytes <= ONE_ROUND_BYTES:
        whole = [torch.empty_like(flat) for _ in range(transport.size)]
        transport.gather_all(flat, whole).wait()
        return _sum(whole).view(partial.shape)
    parts = list(flat.tensor_split(transport.size))
    mine = [torch.empty_like(parts[transport.rank]) for _ in range(transport.size)]
    transport.all_to_all(parts, mine).wait()
    total = torch.empty_like(flat)
    transport.gather_all(_sum(mine), list(total.tensor_split(transport.size))).wait()
    return total.view(partial.shape)


def join_last_dim(part: torch.Tensor, widths: tuple[int, ...], transport: RingTransport) -> torch.Tensor:
    """Every rank's `part` [..., widths[rank]] beside each other: [..., sum(widths)]. Raises as `all_reduce`."""
    if transport.size == 1:
        return part
    own = part.contiguous()
    parts = [own.new_empty(*own.shape[:-1], width) for width in widths]
    transport.gather_all(own, parts).wait()
    return torch.cat(parts, dim=-1)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)

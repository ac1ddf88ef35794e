"""Staging of tensors of the CPU, as if they were on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class PoisonedStaging:
    """Staging in plain memory that is full of NaN before it is used; `num_waits` counts waits for the device."""

    def __init__(self) -> None:
        self.num_waits = 0

    def covers(self, tensor: torch.Tensor) -> bool:
        return True

    def room(self, like: torch.Tensor) -> torch.Tensor:
        room = torch.empty_like(like)
        return room.fill_(torch.nan) if room.is_floating_point() else room

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.num_waits += 1
        return [self.room(tensor).copy_(tensor) for tensor in tensors]

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        tensor.copy_(host)

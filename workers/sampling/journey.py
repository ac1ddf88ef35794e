"""Brings drawn tokens to a ring's first rank. Collective: that rank calls `gather_drawn`, every other `send_drawn`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_core.transport.interface import RingTransport
from workers.sampling.parameters import Sampled
from workers.sampling.words import num_words, read_words, write_words

FIRST = 0


def send_drawn(sampled: Sequence[Sampled], transport: RingTransport, device: torch.device) -> None:
    """Send what this rank drew, in the order in which the first rank expects it. Raises Unavailable."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    sends = [_message(sampled, device) if peer == FIRST else nothing for peer in range(transport.size)]
    transport.all_to_all(sends, [nothing] * transport.size).wait()


def gather_drawn(
    sampled: Sequence[Sampled],
    num_tops: Sequence[Sequence[int | None]],
    transport: RingTransport,
    device: torch.device,
) -> list[list[Sampled]]:
    """What each rank drew, `sampled` being the first one's own.

    `num_tops[r]` says of every row of rank r how many top tokens its log-probabilities name, None where it wants none:
    so each message's length is known before it comes. Raises Unavailable.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    arrived = [torch.empty(sum(map(num_words, tops)), dtype=torch.int64, device=device) for tops in num_tops]
    transport.all_to_all([_message(sampled, device), *[nothing] * (transport.size - 1)], arrived).wait()
    return [read_words(words.tolist(), tops) for words, tops in zip(arrived, num_tops, strict=True)]


def _message(sampled: Sequence[Sampled], device: torch.device) -> torch.Tensor:
    return torch.tensor(write_words(sampled), dtype=torch.int64, device=device)
